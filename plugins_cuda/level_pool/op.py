"""LevelPool: what one pass drafted of every level becomes the pool of a tree's candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.level_pool.lowering import lower
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import STATE_ONLY
from specbuild.plugins_cuda.tree_expand.op import stable_topk

if TYPE_CHECKING:
    import torch


def reference(
    tokens: torch.Tensor, scores: torch.Tensor, *, depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The candidates of a tree in which what follows a node depends on its level alone.

    ``tokens``, ``scores`` [B, D·K], D = ``depth``, are TreeExpand's of D nodes that stand for the
    levels: K tokens each, by falling log-probability. Level 1 is those of the first. The K best
    nodes of a level, the lower index first among equals, have the K tokens of the next level as
    children, and a node's score is the sum along its path.

    Returns pool_tokens, pool_scores and pool_parents [B, M], M = K + (D − 1)·K²: level by level, a
    parent by its index in the pool, −1 for the root. They are TreeSelect's inputs.
    """
    import torch

    batch, k = tokens.shape[0], tokens.shape[1] // depth
    of_levels = tokens.reshape(batch, depth, k), scores.reshape(batch, depth, k)
    pools: list[list[torch.Tensor]] = []
    for ids, log_p in zip(*of_levels, strict=True):
        level, first = log_p[0], 0
        found = [ids[0]], [level], [torch.full((k,), -1)]
        for below in range(1, depth):
            best, places = stable_topk(level, k)
            found[0].append(ids[below].repeat(k))
            found[2].append((places + first).repeat_interleave(k))
            first += len(level)
            level = (best[:, None] + log_p[below]).flatten()
            found[1].append(level)
        pools.append([torch.cat(part) for part in found])
    made = [torch.stack(part) for part in zip(*pools, strict=True)]
    return made[0].int(), made[1], made[2].int()


OP = OpSpec(
    name="LevelPool",
    doc="The likeliest tokens of every level of one pass to the candidates of a tree.",
    inputs=(
        TensorSpec("tokens", "int32", ("B", "DK")),
        TensorSpec("scores", "float32", ("B", "DK")),
    ),
    outputs=(
        TensorSpec("pool_tokens", "int32", ("B", "M")),
        TensorSpec("pool_scores", "float32", ("B", "M")),
        TensorSpec("pool_parents", "int32", ("B", "M")),
    ),
    attributes=(AttributeSpec("depth", int),),
    reference=reference,
    lower=lower,
    traffic=STATE_ONLY,
)
