"""Drafts a tree level by level, as EAGLE3 and MTP layers do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from specbuild.builder.backends.cuda.step.draft import Drafting, fuse
from specbuild.builder.backends.cuda.step.draft_parts import DraftParts
from specbuild.builder.backends.cuda.step.draft_trees import select
from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.plugins_cuda.launches import TensorInfo
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import SELECT, level_section


class LevelStep:
    """See :class:`DraftStep`: one pass per level, whose hidden states are the next pass's input."""

    def tree(self, drafting: Drafting) -> dict[str, Tensor]:
        """See :class:`DraftStep`."""
        depth = drafting.shape.draft_depth
        pool = candidates(drafting)
        rows = drafting.pending_rows(0, drafting.batch)
        hidden, expanded = drafting.run(rows, drafting.fused_states(rows), level=1)
        parents = {"parent_rows": rows["logit_rows"]}
        for level in range(1, depth):
            rows = add_level(drafting, level, hidden, expanded, {**parents, **pool})
            hidden, expanded = drafting.run(rows, rows["hidden_rows"], level=level + 1)
            parents = {"parent_bits": rows["ancestor_bits"]}
        add_level(drafting, depth, hidden, expanded, {**parents, **pool})
        return select(drafting.parts, drafting.program, drafting.shape, pool)

    def write_rows(
        self,
        parts: EngineParts,
        draft: DraftParts,
        program: ProgramIr,
        states: Tensor,
        inputs: Mapping[str, Tensor],
    ) -> None:
        """See :class:`DraftStep`."""
        placement = parts.placement(
            draft.full_name("draft"),
            program,
            {**inputs, "hidden": fuse(parts, draft, program, states)},
            rows=states.shape[0],
            logit_rows=inputs[f"{draft.group}.page_table"].shape[0],
        )
        placement.place(placement.graph.pools)


LEVELS = LevelStep()


def tree_candidates(
    drafts: Iterable[DraftParts], shapes: Mapping[str, Sequence[DraftShape]]
) -> int:
    """The largest pool of the trees that drafts grow level by level; 0 for chains alone.

    ``shapes`` are those of each draft, by what ``EngineParts.drafts`` calls it.
    """
    by_levels = (draft for draft in drafts if isinstance(draft.step, LevelStep))
    trees = (s for draft in by_levels for s in shapes[draft.drafter] if s.draft_top_k > 1)
    return max((shape.candidates for shape in trees), default=0)


def add_level(
    drafting: Drafting,
    level: int,
    hidden: Tensor,
    expanded: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Call LevelInputs: add candidates to the pool and, above the deepest level, lay out rows."""
    k, depth = drafting.shape.draft_top_k, drafting.shape.draft_depth
    last = level == depth
    drafting.program.section = SELECT if last else level_section(level + 1)
    return drafting.program.call(
        "LevelInputs",
        {
            **expanded,
            "hidden": hidden,
            **others,
            **drafting.parts.state("LevelInputs", drafting.batch),
            "page_table": drafting.table,
        },
        {
            "level": level,
            "depth": depth,
            "page_size": drafting.parts.page_size,
            "last": int(last),
        },
        optional_outputs=not last,
        sizes={
            "T": drafting.batch * k,
            "B1": drafting.batch + 1,
            "words": max(1, -(-k * (depth - 1) // 32)),
        },
    )


def candidates(drafting: Drafting) -> dict[str, Tensor]:
    """Allocate the candidate pool, and the indices of the frontier in it, for LevelInputs."""
    pool, k = drafting.shape.candidates, drafting.shape.draft_top_k
    shapes = {
        "pool_tokens": (pool, "int32"),
        "pool_scores": (pool, "float32"),
        "pool_parents": (pool, "int32"),
        "frontier_pool": (k, "int32"),
    }
    return {
        name: drafting.program.scratch(name, TensorInfo((drafting.batch, width), dtype))
        for name, (width, dtype) in shapes.items()
    }
