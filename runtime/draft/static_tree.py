"""A draft tree of a fixed form: the form defines each node's parent and its token's rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specbuild.runtime.draft.tree import DraftTrees, pack_bits
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError

# Upper limit for tree files, above the number of nodes that any engine verifies.
MAX_NODES = 4096


@dataclass(frozen=True)
class StaticTree(DraftShape):
    """A shape with a fixed form: ``parents`` holds the slot of each node's parent.

    Slot 0 is the root. Nodes are in order of depth, and node i has slot i + 1. The first child of a
    node has the draft's most likely token, the second child the second most likely token, and so
    on, as in Medusa (arXiv 2401.10774).
    """

    parents: tuple[int, ...]

    @classmethod
    def of(cls, parents: Sequence[int]) -> StaticTree:
        """Return the tree in which node i has parent ``parents[i]``; −1 is the root.

        A parent precedes its children. Raises RequestError if the list is not a tree.
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
                    "the index of an earlier node"
                )
            depths.append(1 if parent < 0 else depths[parent] + 1)
        order = sorted(range(len(parents)), key=depths.__getitem__)
        slot = {-1: 0} | {node: i + 1 for i, node in enumerate(order)}
        sorted_parents = tuple(slot[parents[node]] for node in order)
        widest = max(map(sorted_parents.count, set(sorted_parents)))
        return cls(widest, max(depths), len(parents), sorted_parents)

    @property
    def candidates(self) -> int:
        """The number of nodes, since all are verified."""
        return self.draft_tokens

    @cached_property
    def depths(self) -> np.ndarray:
        """The depth of every slot, int32 [N + 1]."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return np.array(depths, np.int32)

    @cached_property
    def ranks(self) -> np.ndarray:
        """The index of each node among its parent's children, int32 [N]."""
        return np.array([self.parents[:i].count(p) for i, p in enumerate(self.parents)], np.int32)

    @cached_property
    def inner(self) -> np.ndarray:
        """The slots of nodes with children, ascending and without the root, int32."""
        return np.array(sorted(set(self.parents) - {0}), np.int32)

    @cached_property
    def ancestors(self) -> np.ndarray:
        """The slots on each slot's path, itself and the root included: bool [N + 1, N + 1]."""
        mask = np.eye(len(self.parents) + 1, dtype=bool)
        for slot, parent in enumerate(self.parents, start=1):
            mask[slot] |= mask[parent]
        return mask

    def shallower(self, depth: int) -> StaticTree:
        """Return the tree without the nodes below ``depth``."""
        num_nodes = int((self.depths[1:] <= depth).sum())
        return StaticTree.of([parent - 1 for parent in self.parents[:num_nodes]])

    def trees(self, roots: Sequence[int], tokens: np.ndarray) -> DraftTrees:
        """Return the tree below each root, with ``tokens`` [B, N] at its nodes."""
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

    def placed(self, program: DraftShape) -> PlacedTree | None:
        """Return the tree in a device's step for trees up to ``program``; None if it has no place.

        Such a step runs the draft over K nodes of each level, and keeps the children of K.
        """
        inner = np.bincount(self.depths[self.inner], minlength=1)
        has_place = (
            self.draft_top_k <= program.draft_top_k
            and self.draft_depth <= program.draft_depth
            and self.draft_tokens <= program.draft_tokens
            and inner.max() <= program.draft_top_k
        )
        sizes = (self.draft_top_k, self.draft_depth, self.draft_tokens, self.parents)
        return PlacedTree(*sizes, program) if has_place else None

    def of_positions(self, roots: Sequence[int], tokens: np.ndarray) -> DraftTrees:
        """Return the tree below each root, from ``tokens`` [B, D, K]: K ranked tokens per depth."""
        return self.trees(roots, tokens[:, self.depths[1:] - 1, self.ranks])


@dataclass(frozen=True)
class PlacedTree(StaticTree):
    """A static tree in a step whose draft grows trees up to the shape ``program``.

    The draft selects its frontier and its nodes by scores. So the form of a tree is a score of each
    child: the lower its depth, the higher, and nodes with children before the others.
    """

    program: DraftShape

    @cached_property
    def form(self) -> np.ndarray:
        """The score of every candidate of the pool, fp32 [K + (D − 1)·K²], −inf for absent ones.

        Entry (f, r) of a level is child r of the f-th node of the frontier. A device's frontier is
        the K best of a level, equal scores in the order of their entries.
        """
        top_k, inner = self.program.draft_top_k, set(self.inner.tolist())
        levels, frontier = [], [0]
        for level in range(1, self.program.draft_depth + 1):
            scores = np.full((len(frontier) if level == 1 else top_k, top_k), -np.inf, np.float32)
            places: dict[int, tuple[int, int]] = {}
            for slot in np.flatnonzero(self.depths == level).tolist():
                f, rank = frontier.index(self.parents[slot - 1]), int(self.ranks[slot - 1])
                scores[f, rank] = -level if slot in inner else -level - 0.5
                places[slot] = (f, rank)
            levels.append(scores.ravel())
            frontier = sorted(inner & places.keys(), key=places.__getitem__)
        return np.concatenate(levels)
