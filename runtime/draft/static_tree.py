"""A draft tree that a user gives: where nodes stand, and which of the draft's tokens they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specbuild.runtime.draft.tree import DraftTrees, pack_bits
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError

# A file names no more nodes than any engine verifies.
MAX_NODES = 4096


@dataclass(frozen=True)
class StaticTree(DraftShape):
    """A shape whose nodes stand where ``parents`` says: the slot of each node's parent.

    Slot 0 is the root, and node i has slot i + 1; nodes stand in order of depth. The first child of
    a node takes the draft's likeliest token there, the second the next one, and so on (as the
    trees of Medusa, arXiv 2401.10774).
    """

    parents: tuple[int, ...]

    @classmethod
    def of(cls, parents: Sequence[int]) -> StaticTree:
        """From each node's parent, by the place of the node in the list: −1 is the root.

        A parent stands before its children; else the nodes may come in any order. RequestError
        where the list is no tree.
        """
        if not 1 <= len(parents) <= MAX_NODES:
            raise RequestError(
                f"a draft tree has {len(parents)} nodes; give the parents of 1 to {MAX_NODES}"
            )
        depths: list[int] = []
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise RequestError(
                    f"node {node} of the draft tree has parent {parent}; give -1 for the root, or "
                    "the place of a node before it"
                )
            depths.append(1 if parent < 0 else depths[parent] + 1)
        order = sorted(range(len(parents)), key=depths.__getitem__)
        slot = {-1: 0} | {node: i + 1 for i, node in enumerate(order)}
        sorted_parents = tuple(slot[parents[node]] for node in order)
        widest = max(map(sorted_parents.count, set(sorted_parents)))
        return cls(widest, max(depths), len(parents), sorted_parents)

    @property
    def candidates(self) -> int:
        """Every node is kept."""
        return self.draft_tokens

    @cached_property
    def depths(self) -> np.ndarray:
        """Of every slot, the root's first: int32 [N + 1]."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return np.array(depths, np.int32)

    @cached_property
    def ranks(self) -> np.ndarray:
        """Which of its parent's children each node is: int32 [N]."""
        return np.array([self.parents[:i].count(p) for i, p in enumerate(self.parents)], np.int32)

    @cached_property
    def inner(self) -> np.ndarray:
        """Slots of the nodes that have children, the root left out, in order: int32."""
        return np.array(sorted(set(self.parents) - {0}), np.int32)

    @cached_property
    def ancestors(self) -> np.ndarray:
        """Bool [N + 1, N + 1]: the slots on each slot's path, its own and the root's too."""
        seen = np.eye(len(self.parents) + 1, dtype=bool)
        for slot, parent in enumerate(self.parents, start=1):
            seen[slot] |= seen[parent]
        return seen

    def shallower(self, depth: int) -> StaticTree:
        """The tree without the nodes below ``depth``."""
        kept = int((self.depths[1:] <= depth).sum())
        return StaticTree.of([parent - 1 for parent in self.parents[:kept]])

    def trees(self, roots: Sequence[int], tokens: np.ndarray) -> DraftTrees:
        """The tree below each root, with ``tokens`` [B, N] at its nodes."""
        batch, slots = len(roots), self.draft_tokens + 1
        parents = np.array([-1, *self.parents], np.int32)
        return DraftTrees(
            tokens=np.concatenate([np.array(roots, np.int32)[:, None], tokens], axis=1),
            parents=np.tile(parents, (batch, 1)),
            depths=np.tile(self.depths, (batch, 1)),
            ancestor_bits=np.tile(pack_bits(self.ancestors), (batch, 1, 1)),
            count=np.full(batch, slots, np.int32),
            contiguous=self.draft_top_k == 1,
            full=True,
        )

    def of_positions(self, roots: Sequence[int], tokens: np.ndarray) -> DraftTrees:
        """The tree where tokens depend on their depth alone: ``tokens`` [B, D, K], by rank."""
        return self.trees(roots, tokens[:, self.depths[1:] - 1, self.ranks])
