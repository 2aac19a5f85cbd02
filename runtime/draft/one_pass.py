"""What is drafted from logits of all positions at once: the likeliest chain, or a tree's pool."""

from __future__ import annotations

import numpy as np


def candidate_pool(tokens: np.ndarray, scores: np.ndarray) -> dict[str, np.ndarray]:
    """The pool of a tree's nodes where what follows a node depends on its depth alone.

    ``tokens`` int32, ``scores`` fp32 [B, D, K]: the K likeliest tokens of each position, by falling
    log-probability. Level 1 is those of the first position. At each further level the K best nodes
    of the level before, the lower index first among equals, have the K tokens of the position as
    children; a node's score is the sum along its path. Returns tokens, scores and parents
    [B, K + (D − 1)·K²], level by level, −1 for the root: the inputs of the role ``select``.
    """
    batch, depth, k = tokens.shape
    level, offset = scores[:, 0], 0
    pool_tokens, pool_scores = [tokens[:, 0]], [level]
    parents = [np.full((batch, k), -1, np.int32)]
    for position in range(1, depth):
        best = np.argsort(-level, axis=1, kind="stable")[:, :k]
        best_scores = np.take_along_axis(level, best, axis=1)
        children = np.minimum(scores[:, position], 0)[:, None, :]
        parents.append(np.repeat((best + offset).astype(np.int32), k, axis=1))
        offset += level.shape[1]
        level = (best_scores[:, :, None] + children).reshape(batch, k * k)
        pool_tokens.append(np.tile(tokens[:, position], (1, k)))
        pool_scores.append(level)
    return {
        "tokens": np.concatenate(pool_tokens, axis=1),
        "scores": np.concatenate(pool_scores, axis=1),
        "parents": np.concatenate(parents, axis=1),
    }
