"""The draft in a step's program: it takes up what was committed, then drafts a tree.

It grows by levels, or out of one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specbuild.builder.backends.cuda.step.block_draft import draft_block, keep_context
from specbuild.builder.backends.cuda.step.draft_parts import DraftParts
from specbuild.builder.backends.cuda.step.draft_trees import expand, select, tree_of_levels
from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.target import logits
from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.plugins_cuda.launches import TensorInfo
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import SELECT, level_section


@dataclass(frozen=True)
class Drafting:
    """A tree of one draft's and shape for every sequence of a batch, as calls of a program.

    ``state`` takes the place of ports.
    """

    parts: EngineParts
    draft: DraftParts
    program: ProgramIr
    batch: int
    shape: DraftShape
    state: Mapping[str, Tensor] = field(default_factory=dict)

    def tree(self) -> dict[str, Tensor]:
        """TreeSelect's outputs: tree_tokens, tree_parents, depths, ancestor_bits, count."""
        if self.draft.block is not None or self.draft.mask is not None:
            return tree_of_levels(self.parts, self.program, self.shape, self._levels())
        depth = self.shape.draft_depth
        pool = self._candidates()
        rows, hidden, expanded = self._extend()
        parents = {"parent_rows": rows["logit_rows"]}
        for level in range(1, depth):
            rows = self._level(level, hidden, expanded, {**parents, **pool})
            hidden, expanded = self._run(rows, rows["hidden_rows"])
            parents = {"parent_bits": rows["ancestor_bits"]}
        self._level(depth, hidden, expanded, {**parents, **pool})
        return select(self.parts, self.program, self.shape, pool)

    def _levels(self) -> dict[str, Tensor]:
        """The TreeExpand of one pass: of each level, and nothing of what stands in front of it.

        It drafts at mask rows behind what is taken up, or in a block of its own.
        """
        if self.draft.block is None:
            rows = self._waiting(0, self.batch, masks=self.shape.draft_depth - 1)
            return self._run(rows, self._fused(rows))[1]
        self.take_up()
        return draft_block(self.parts, self.draft, self.program, self.batch, self.shape)

    def _level(
        self,
        level: int,
        hidden: Tensor,
        expanded: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """LevelInputs: candidates into the pool and, but for the deepest level, the next rows."""
        k, depth = self.shape.draft_top_k, self.shape.draft_depth
        last = level == depth
        self.program.section = SELECT if last else level_section(level + 1)
        return self.program.call(
            "LevelInputs",
            {
                **expanded,
                "hidden": hidden,
                **others,
                **self.parts.state("LevelInputs", self.batch),
                "page_table": self._table,
            },
            {
                "level": level,
                "depth": depth,
                "page_size": self.parts.page_size,
                "last": int(last),
            },
            optional_outputs=not last,
            sizes={
                "T": self.batch * k,
                "B1": self.batch + 1,
                "words": max(1, -(-k * (depth - 1) // 32)),
            },
        )

    def take_up(self) -> None:
        """The rows that were committed since the draft last ran: their keys and values only.

        Sequences take turns where all of them have more rows than a launch that decodes may have.
        """
        capacity = self.parts.ports.sizes.depth + 1
        together = 1 << ((MAX_DECODE_ROWS // capacity).bit_length() - 1)
        for first in range(0, self.batch, together):
            count = min(together, self.batch)
            rows = self._waiting(first, count)
            inputs = self.draft.inputs(rows, self._table.rows(first, count))
            keep_rows(self.parts, self.draft, self.program, rows["captured_rows"], inputs)

    def _extend(self) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """The rows that were committed since the draft last ran, and the first level's children."""
        rows = self._waiting(0, self.batch)
        return (rows, *self._run(rows, self._fused(rows)))

    @property
    def _table(self) -> Tensor:
        return self.parts.page_table(self.draft.group, self.batch)

    def _fused(self, rows: Mapping[str, Tensor]) -> Tensor:
        return fuse(self.parts, self.draft, self.program, rows["captured_rows"])

    def _waiting(self, first: int, count: int, *, masks: int = 0) -> dict[str, Tensor]:
        """The rows that wait for the draft: ExtendInputs' outputs.

        Those of ``count`` sequences from ``first`` on, with ``masks`` mask rows behind each.
        """
        capacity = self.parts.ports.sizes.depth + 1
        state = {**self.parts.state("ExtendInputs", self.batch), **self.state}
        state["page_table"], mask = self._table, self.draft.mask
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
                "mask_token": mask.token if mask and masks else 0,
            },
            sizes={
                "T": count * (capacity + masks),
                "B1": count + 1,
                "R": count * (1 + masks),
                "F": 1 + masks,
            },
        )

    def _run(self, rows: Mapping[str, Tensor], hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The draft over these rows: hidden_out [T, H], and the TreeExpand of its logits."""
        placement = self.parts.placement(
            self.draft.own("draft"),
            self.program,
            {**self.draft.inputs(rows, self._table), "hidden": hidden},
            rows=hidden.shape[0],
            logit_rows=rows["logit_rows"].shape[0],
        )
        graph = placement.graph
        out = graph.output("hidden_out")
        assert out is not None and graph.head is not None and graph.head.inputs[0] is not None
        placement.place([*graph.pools, graph.head.inputs[0], out])
        k = self.shape.draft_top_k
        draft, score = self.draft, rows["score"]
        expanded = expand(self.parts, draft, self.program, logits(placement), score, children=k)
        hidden_out = placement.value(out)
        assert hidden_out is not None
        return hidden_out, expanded

    def _candidates(self) -> dict[str, Tensor]:
        """The candidate pool and the frontier's places in it, as LevelInputs fills them."""
        pool, k = self.shape.candidates, self.shape.draft_top_k
        shapes = {
            "pool_tokens": (pool, "int32"),
            "pool_scores": (pool, "float32"),
            "pool_parents": (pool, "int32"),
            "frontier_pool": (k, "int32"),
        }
        return {
            name: self.program.scratch(name, TensorInfo((self.batch, width), dtype))
            for name, (width, dtype) in shapes.items()
        }


def fuse(parts: EngineParts, draft: DraftParts, program: ProgramIr, aux_hidden: Tensor) -> Tensor:
    """The role ``draft_fuse``: aux_hidden [T, C] to the draft's hidden [T, H]."""
    placement = parts.placement(
        draft.own("draft_fuse"),
        program,
        {"captured": parts.own_states(draft, program, aux_hidden)},
        rows=aux_hidden.shape[0],
        logit_rows=1,
    )
    output = placement.graph.output("hidden")
    assert output is not None
    placement.place([output])
    hidden = placement.value(output)
    assert hidden is not None
    return hidden


def keep_rows(
    parts: EngineParts,
    draft: DraftParts,
    program: ProgramIr,
    states: Tensor,
    inputs: Mapping[str, Tensor],
) -> None:
    """A draft's keys and values of rows go into its cache; nothing else of it is computed.

    ``states`` [T, C] are the target's. ``inputs`` place the rows (:meth:`DraftParts.inputs`), but
    for ``logit_rows``.
    """
    if draft.block is not None:
        keep_context(parts, draft, program, states, inputs)
        return
    placement = parts.placement(
        draft.own("draft"),
        program,
        {**inputs, "hidden": fuse(parts, draft, program, states)},
        rows=states.shape[0],
        logit_rows=inputs[f"{draft.group}.page_table"].shape[0],
    )
    placement.place(placement.graph.pools)
