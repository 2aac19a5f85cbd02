"""LevelPool: the tokens of a one-pass draft, by level, become the candidates of a tree."""

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
    """Return the candidates of a tree in which the children of a node depend only on its level.

    ``tokens``, ``scores`` [B, D·K], D = ``depth``, are the outputs of TreeExpand for D nodes, one
    per level: K tokens each, by falling log-probability. Level 1 has the tokens of the first node.
    The K best nodes of a level (lower index on ties) have the K tokens of the next level as
    children. The score of a node is the sum along its path.

    Returns pool_tokens, pool_scores and pool_parents [B, M], M = K + (D − 1)·K², level by level. A
    parent is an index in the pool, or −1 for the root. They are the inputs of TreeSelect.
    """
    import torch

    batch, k = tokens.shape[0], tokens.shape[1] // depth
    of_levels = tokens.reshape(batch, depth, k), scores.reshape(batch, depth, k)
    pools: list[list[torch.Tensor]] = []
    for ids, log_p in zip(*of_levels, strict=True):
        level, first = log_p[0], 0
        pool = [ids[0]], [level], [torch.full((k,), -1)]
        for below in range(1, depth):
            best, places = stable_topk(level, k)
            pool[0].append(ids[below].repeat(k))
            pool[2].append((places + first).repeat_interleave(k))
            first += len(level)
            level = (best[:, None] + log_p[below]).flatten()
            pool[1].append(level)
        pools.append([torch.cat(part) for part in pool])
    outputs = [torch.stack(part) for part in zip(*pools, strict=True)]
    return outputs[0].int(), outputs[1], outputs[2].int()


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
