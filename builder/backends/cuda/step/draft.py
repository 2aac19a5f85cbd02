"""A draft model in a step's program: it ingests the committed tokens, then drafts a tree.

The family's :class:`DraftStep` defines both, either level by level (``draft_levels.py``) or in one
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from specbuild.builder.backends.cuda.step.draft_parts import DraftParts
from specbuild.builder.backends.cuda.step.draft_trees import expand
from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.target import logits
from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import level_section


class DraftStep(Protocol):
    """The calls that a kind of draft model adds to a step's program."""

    def tree(self, drafting: Drafting) -> dict[str, Tensor]:
        """See :meth:`Drafting.tree`."""
        ...

    def write_rows(
        self,
        parts: EngineParts,
        draft: DraftParts,
        program: ProgramIr,
        states: Tensor,
        inputs: Mapping[str, Tensor],
    ) -> None:
        """Write a draft's keys and values of rows to its cache, and compute nothing else.

        ``states`` [T, C] are the target's. ``inputs`` has the positions and slots of the rows
        (:meth:`DraftParts.inputs`), without ``logit_rows``.
        """
        ...


@dataclass(frozen=True)
class CudaDraft:
    """A family of draft models in CUDA engines.

    ``require(target, draft)`` raises SpecbuildError for a geometry without kernels.
    """

    step: DraftStep
    require: Callable[[TargetGeometry, Any], None]


@dataclass(frozen=True)
class Drafting:
    """One draft's tree of one shape for every sequence of a batch, as calls of a program.

    ``state`` replaces ports of the same names.
    """

    parts: EngineParts
    draft: DraftParts
    program: ProgramIr
    batch: int
    shape: DraftShape
    state: Mapping[str, Tensor] = field(default_factory=dict)

    def tree(self) -> dict[str, Tensor]:
        """Return TreeSelect's outputs: tree_tokens, tree_parents, depths, ancestor_bits, count."""
        return self.draft.step.tree(self)

    def ingest(self) -> None:
        """Write keys and values of the rows that were committed since the draft's last run.

        Several launches are used if the rows of all sequences exceed those of a decode launch.
        """
        capacity = self.parts.ports.sizes.depth + 1
        max_sequences = 1 << ((MAX_DECODE_ROWS // capacity).bit_length() - 1)
        for first in range(0, self.batch, max_sequences):
            count = min(max_sequences, self.batch)
            rows = self.pending_rows(first, count)
            inputs = self.draft.inputs(rows, self.table.rows(first, count))
            states = rows["captured_rows"]
            self.draft.step.write_rows(self.parts, self.draft, self.program, states, inputs)

    @property
    def table(self) -> Tensor:
        """The page table of the draft's cache group, [batch, P]."""
        return self.parts.page_table(self.draft.group, self.batch)

    def fused_states(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden states [T, H] of pending rows."""
        return fuse(self.parts, self.draft, self.program, rows["captured_rows"])

    def pending_rows(
        self, first: int, count: int, *, masks: int = 0, mask_token: int = 0
    ) -> dict[str, Tensor]:
        """Return ExtendInputs' outputs: the pending rows of the draft.

        They belong to ``count`` sequences from ``first`` on, with ``masks`` rows of ``mask_token``
        after those of each sequence.
        """
        capacity = self.parts.ports.sizes.depth + 1
        state = {**self.parts.state("ExtendInputs", self.batch), **self.state}
        state["page_table"] = self.table
        self.program.section = level_section(1)
        return self.program.call(
            "ExtendInputs",
            {
                **{name: tensor.rows(first, count) for name, tensor in state.items()},
                "mask_captured": self.parts.mask_states(self.draft) if masks else None,
            },
            {
                "page_size": self.parts.page_size,
                "masks": masks,
                "mask_token": mask_token,
            },
            sizes={
                "T": count * (capacity + masks),
                "B1": count + 1,
                "R": count * (1 + masks),
                "F": 1 + masks,
            },
        )

    def run(
        self,
        rows: Mapping[str, Tensor],
        hidden: Tensor,
        *,
        level: int | None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the draft on these rows; return hidden_out [T, H] and the TreeExpand of its logits.

        ``level`` is the level of the children, as in :func:`expand`. ``inputs`` place the rows in
        caches, by default in the draft's.
        """
        inputs = self.draft.inputs(rows, self.table) if inputs is None else inputs
        placement = self.parts.placement(
            self.draft.full_name("draft"),
            self.program,
            {**inputs, "hidden": hidden},
            rows=hidden.shape[0],
            logit_rows=rows["logit_rows"].shape[0],
        )
        graph = placement.graph
        out = graph.output("hidden_out")
        assert out is not None and graph.head is not None
        head_inputs = [value for value in graph.head.inputs if value is not None]
        placement.place([*graph.pools, *head_inputs, out])
        k = self.shape.draft_top_k
        expanded = expand(
            self.parts,
            self.draft,
            self.program,
            {"logits": logits(placement), "score": rows["score"]},
            children=k,
            level=level,
        )
        hidden_out = placement.value(out)
        assert hidden_out is not None
        return hidden_out, expanded


def fuse(parts: EngineParts, draft: DraftParts, program: ProgramIr, aux_hidden: Tensor) -> Tensor:
    """Call the role ``draft_fuse``: aux_hidden [T, C] to the draft's hidden [T, H]."""
    placement = parts.placement(
        draft.full_name("draft_fuse"),
        program,
        {"captured": parts.draft_states(draft, program, aux_hidden)},
        rows=aux_hidden.shape[0],
        logit_rows=1,
    )
    output = placement.graph.output("hidden")
    assert output is not None
    placement.place([output])
    hidden = placement.value(output)
    assert hidden is not None
    return hidden
