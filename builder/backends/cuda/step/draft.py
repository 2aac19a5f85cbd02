"""The draft in a step's program: it takes up what was committed, then drafts a tree.

It grows by levels, or out of one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specbuild.builder.backends.cuda.step.block_draft import draft_block, keep_context
from specbuild.builder.backends.cuda.step.draft_trees import expand, select, tree_of_levels
from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.target import logits
from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.plugins_cuda.launches import TensorInfo
from specbuild.runtime.engine_dir.cache_groups import DRAFT_GROUP
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import SELECT, level_section

_LAUNCH = ("token_ids", "positions", "row_start", "ancestor_bits", "logit_rows")
_VIEW = ("row_slot", "tree_start", "write_slot")


@dataclass(frozen=True)
class Drafting:
    """A tree of one shape for every sequence of a batch, as calls of a program.

    ``state`` takes the place of ports.
    """

    parts: EngineParts
    program: ProgramIr
    batch: int
    shape: DraftShape
    state: Mapping[str, Tensor] = field(default_factory=dict)

    def tree(self) -> dict[str, Tensor]:
        """TreeSelect's outputs: tree_tokens, tree_parents, depths, ancestor_bits, count."""
        if self.parts.block is not None or self.parts.mask is not None:
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
        if self.parts.block is None:
            rows = self._waiting(0, self.batch, masks=self.shape.draft_depth - 1)
            return self._run(rows, fuse(self.parts, self.program, rows["captured_rows"]))[1]
        self.take_up()
        return draft_block(self.parts, self.program, self.batch, self.shape)

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
                "page_table": self.parts.page_table(DRAFT_GROUP, self.batch),
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
            ports = {name: rows[name] for name in _LAUNCH}
            ports |= {f"{DRAFT_GROUP}.{name}": rows[name] for name in _VIEW}
            table = self.parts.page_table(DRAFT_GROUP, first + count).rows(first, count)
            keep_rows(self.parts, self.program, rows["captured_rows"], ports, table)

    def _extend(self) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """The rows that were committed since the draft last ran, and the first level's children."""
        rows = self._waiting(0, self.batch)
        hidden = fuse(self.parts, self.program, rows["captured_rows"])
        return (rows, *self._run(rows, hidden))

    def _waiting(self, first: int, count: int, *, masks: int = 0) -> dict[str, Tensor]:
        """The rows that wait for the draft: ExtendInputs' outputs.

        Those of ``count`` sequences from ``first`` on, with ``masks`` mask rows behind each.
        """
        capacity = self.parts.ports.sizes.depth + 1
        state = {**self.parts.state("ExtendInputs", self.batch), **self.state}
        state["page_table"] = self.parts.page_table(DRAFT_GROUP, self.batch)
        self.program.section = level_section(1)
        return self.program.call(
            "ExtendInputs",
            {
                **{name: tensor.rows(first, count) for name, tensor in state.items()},
                "mask_captured": self.parts.mask_states() if masks else None,
            },
            {
                "page_size": self.parts.page_size,
                "masks": masks,
                "mask_token": self.parts.mask.token if self.parts.mask and masks else 0,
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
        ports = {name: rows[name] for name in _LAUNCH}
        ports |= {f"{DRAFT_GROUP}.{name}": rows[name] for name in _VIEW}
        table = self.parts.page_table(DRAFT_GROUP, self.batch)
        ports |= {
            "hidden": hidden,
            f"{DRAFT_GROUP}.page_table": table.view(self.batch, 1, table.shape[1]),
        }
        placement = self.parts.placement(
            "draft",
            self.program,
            ports,
            rows=hidden.shape[0],
            logit_rows=rows["logit_rows"].shape[0],
        )
        graph = placement.graph
        out = graph.output("hidden_out")
        assert out is not None and graph.head is not None and graph.head.inputs[0] is not None
        placement.place([*graph.pools, graph.head.inputs[0], out])
        k = self.shape.draft_top_k
        expanded = expand(self.parts, self.program, logits(placement), rows["score"], k)
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


def fuse(parts: EngineParts, program: ProgramIr, aux_hidden: Tensor) -> Tensor:
    """The role ``draft_fuse``: aux_hidden [T, C] to the draft's hidden [T, H]."""
    placement = parts.placement(
        "draft_fuse",
        program,
        {"captured": aux_hidden},
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
    program: ProgramIr,
    states: Tensor,
    ports: Mapping[str, Tensor],
    table: Tensor,
) -> None:
    """The draft's keys and values of rows go into its cache; nothing else of it is computed.

    ``states`` [T, C] are the target's. ``ports``: token_ids [T], positions [T] and the cache's
    write_slot [T]; what a layer behind the first attends by beside them. ``table`` [B, P] is the
    sequences' page table.
    """
    if parts.block is not None:
        keep_context(parts, program, states, ports)
        return
    batch = table.shape[0]
    placement = parts.placement(
        "draft",
        program,
        {
            **ports,
            "hidden": fuse(parts, program, states),
            f"{DRAFT_GROUP}.page_table": table.view(batch, 1, table.shape[1]),
        },
        rows=states.shape[0],
        logit_rows=batch,
    )
    placement.place(placement.graph.pools)
