"""Grow a static tree level by level: the draft runs over the nodes that have children."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from specbuild.runtime.cache.row_placement import RowLayout
from specbuild.runtime.draft.static_tree import StaticTree
from specbuild.runtime.draft.tree import DraftTrees, pack_bits
from specbuild.runtime.request import SequenceState


class TreeDrafter(Protocol):
    """A draft model that runs level by level."""

    def tree_starts(self, sequences: Sequence[SequenceState]) -> list[int]:
        """Return the length of each sequence's draft cache, where its tree starts."""
        ...

    def run_rows(
        self,
        sequences: Sequence[SequenceState],
        layout: RowLayout,
        tree_rows: int,
        feeds: Mapping[str, np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run the draft over the newest rows of trees, and return their logits and features.

        ``tree_rows`` is the number of rows of each tree, including these.
        """
        ...

    def best_tokens(
        self, sequences: Sequence[SequenceState], logits: np.ndarray, level: int, top_k: int
    ) -> np.ndarray:
        """Return the best target tokens of each row, which draft ``level``, int32 [rows, K]."""
        ...


def grow(
    draft: TreeDrafter,
    sequences: Sequence[SequenceState],
    tree: StaticTree,
    logits: np.ndarray,
    hidden: np.ndarray,
) -> DraftTrees:
    """Return the tree of each sequence, from logits [B, Vd] and features [B, H] of its last row.

    The draft runs over inner nodes only. Row i of its tree is the node in slot ``tree.inner[i]``.
    """
    batch = len(sequences)
    tokens = np.zeros((batch, tree.draft_tokens + 1), np.int32)
    features = np.zeros((batch, tree.draft_tokens + 1, hidden.shape[1]), np.float32)
    features[:, 0] = hidden
    starts = draft.tree_starts(sequences)
    row_of = {0: -1} | {int(slot): row for row, slot in enumerate(tree.inner)}
    parents = np.array(tree.parents, np.int32)
    frontier = np.zeros(1, np.int32)
    for level in range(1, tree.draft_depth + 1):
        nodes = np.flatnonzero(tree.depths == level)
        best = draft.best_tokens(sequences, logits, level, tree.draft_top_k)
        best = best.reshape(batch, len(frontier), -1)
        parent_rows = np.searchsorted(frontier, parents[nodes - 1])
        tokens[:, nodes] = best[:, parent_rows, tree.ranks[nodes - 1]]
        inner = np.intersect1d(nodes, tree.inner)
        if not len(inner):
            break
        first = row_of[int(inner[0])]
        rows = len(inner)
        ancestors = tree.ancestors[np.ix_(inner, tree.inner)]
        layout = RowLayout([s + first for s in starts], [rows] * batch, starts)
        feeds = {
            "token_ids": tokens[:, inner].reshape(-1),
            "hidden": features[:, parents[inner - 1]].reshape(batch * rows, -1),
            "positions": np.repeat(np.array(starts, np.int32) + (level - 1), rows),
            "ancestor_bits": np.tile(pack_bits(ancestors), (batch, 1)),
        }
        logits, out = draft.run_rows(sequences, layout, first + rows, feeds)
        features[:, inner] = out.reshape(batch, rows, -1)
        frontier = inner
    return tree.trees([s.root for s in sequences], tokens[:, 1:])
