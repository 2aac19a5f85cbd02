"""Calls that convert a draft's logits to candidates, candidates to a tree, and a tree to rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specbuild.builder.backends.cuda.step.draft_parts import DraftParts
from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import SELECT, TREE_FORM

# Replaces a sequence's token limit, which must not affect the rows of a fixed tree.
_NO_LIMIT = 1 << 30


def expand(
    parts: EngineParts,
    draft: DraftParts,
    program: ProgramIr,
    frontier: Mapping[str, Tensor],
    *,
    children: int,
    level: int | None,
) -> dict[str, Tensor]:
    """Call TreeExpand: ``logits`` [B·F, Vd] and ``score`` [B, F] to ``children`` per node.

    The children are on ``level`` 1, 2, …; with None those of node f are on level f + 1. Sampled
    sequences draft with the noise of the position at which the target verifies the children.
    """
    batch, nodes = frontier["score"].shape
    form = None
    if level is not None and children > 1 and TREE_FORM in parts.ports.tensors:
        # The entries of the level in a pool.
        first = 0 if level == 1 else children + (level - 2) * children**2
        form = parts.ports[TREE_FORM].rows(first, nodes * children)
    return program.call(
        "TreeExpand",
        {
            "logits": frontier["logits"],
            "score": frontier["score"],
            "d2t": parts.offsets(draft),
            "top_k": parts.constant(children),
            "temperature": parts.ports.first("temperature", batch),
            "seed": parts.ports.first("seed", batch),
            "position": parts.ports.first("length", batch),
            "form": form,
        },
        {"offset": 0 if level is None else level - 1, "per_node": int(level is None)},
        sizes={"K": children, "FK": nodes * children},
    )


def tree_of_levels(
    parts: EngineParts, program: ProgramIr, shape: DraftShape, expanded: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return TreeSelect's outputs for a one-pass draft, whose ``expanded`` has a node per level.

    A chain has the most probable token of each level and is kept in full.
    """
    tokens, scores, depth = expanded["tokens"], expanded["scores"], shape.draft_depth
    program.section = SELECT
    if shape.draft_top_k == 1:
        parents = parts.chain_parents(tokens.shape[0], depth)
        pool = {"pool_tokens": tokens, "pool_scores": scores, "pool_parents": parents}
    else:
        pool = program.call(
            "LevelPool",
            {"tokens": tokens, "scores": scores},
            {"depth": depth},
            sizes={"M": shape.candidates},
        )
    return select(parts, program, shape, pool)


def select(
    parts: EngineParts, program: ProgramIr, shape: DraftShape, pool: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Call TreeSelect on a pool: pool_tokens, pool_scores and pool_parents [B, M]."""
    nodes = shape.draft_tokens + 1
    return program.call(
        "TreeSelect",
        {
            "tokens": pool["pool_tokens"],
            "scores": pool["pool_scores"],
            "parents": pool["pool_parents"],
            "draft_tokens": parts.constant(shape.draft_tokens),
        },
        {"depth": shape.draft_depth},
        sizes={"N1": nodes, "W": -(-nodes // 32)},
    )


def rows_of_fixed_tree(
    parts: EngineParts,
    program: ProgramIr,
    name: str,
    tree: Mapping[str, torch.Tensor],
    table: Tensor,
) -> dict[str, Tensor]:
    """Return VerifyInputs' outputs for one tree that every sequence has, below its root.

    ``tree`` has int32 ``tree_tokens`` [N] and ``depths`` [N] of the nodes, of which the first is
    the root, and ``tree_bits`` [N, words]. Its constants are stored under ``name``. ``table``
    [B, P] is the page table of the cache that the rows are written to.
    """
    batch, max_batch = table.shape[0], parts.ports.sizes.batch
    nodes, words = tree["tree_bits"].shape
    fixed = {n: t.repeat(max_batch, *[1] * t.dim()) for n, t in tree.items()} | {
        "count": torch.full((max_batch,), nodes, dtype=torch.int32),
        "limit": torch.full((max_batch,), _NO_LIMIT, dtype=torch.int32),
    }
    rows = program.call(
        "VerifyInputs",
        {
            **parts.state("VerifyInputs", batch),
            **{n: parts.fixed(f"{name}.{n}", t).rows(0, batch) for n, t in fixed.items()},
            "page_table_full": table,
        },
        {"page_size": parts.page_size},
        sizes={"T": batch * nodes, "B1": batch + 1, "words": words},
    )
    return {**rows, "write_slot": rows["write_slot_full"]}
