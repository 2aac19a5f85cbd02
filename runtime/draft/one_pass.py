"""Build chains and trees from the logits of all positions, which one pass computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.runtime.draft.eagle3 import Eagle3Drafter
from specbuild.runtime.draft.static_tree import StaticTree
from specbuild.runtime.draft.tree import DraftTrees, chain_trees
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import SequenceState


class OnePassDrafter(Eagle3Drafter):
    """Ingests accepted tokens as EAGLE3 does; one pass returns the logits of every position."""

    def _trees(
        self, sequences: Sequence[SequenceState], logits: np.ndarray, shape: DraftShape, depth: int
    ) -> DraftTrees:
        """Return a chain of the best tokens, the requested static tree, or the best nodes.

        ``logits`` [B · depth, Vd] has the positions of sequence 0, then of sequence 1, and so on.
        """
        batch, k = len(sequences), shape.draft_top_k
        noise = self._noise(sequences, range(1, depth + 1))
        best = self._expand(logits, np.zeros((batch * depth, 1), np.float32), k, noise)
        tokens = best["tokens"].reshape(batch, depth, k)
        if isinstance(shape, StaticTree):
            return shape.of_positions([s.root for s in sequences], tokens)
        if k == 1:
            return chain_trees([s.root for s in sequences], tokens[:, :, 0])
        pool = candidate_pool(tokens, best["scores"].reshape(batch, depth, k))
        return self._best_nodes(
            sequences, **pool, draft_tokens=np.array(shape.draft_tokens, np.int32)
        )


def candidate_pool(tokens: np.ndarray, scores: np.ndarray) -> dict[str, np.ndarray]:
    """Return the candidate nodes of trees: the inputs of the role ``select``.

    ``tokens`` int32 and ``scores`` fp32 [B, D, K] are the K most likely tokens of each position and
    their log-probabilities, in descending order. Level 1 has the K tokens of the first position.
    At each further level, the K best nodes of the previous level each get the K tokens of the
    position as children. Among nodes of equal score the lower index is better. A node's score is
    the sum along its path. The returned tokens, scores and parents [B, K + (D − 1)·K²] are in order
    of levels; parent −1 is the root.
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
