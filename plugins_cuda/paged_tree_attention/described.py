"""The description of an attention launch for tests: its sequences, and arrays of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.paged_tree_attention.body import WHOLE

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Branch:
    """One sequence of a launch.

    ``context`` slots are filled already. ``chain`` causal rows follow, and then a tree, where
    ``parents[j]`` is the parent node of node j, -1 for none. ``tree_rows`` are the nodes that are
    rows of this launch (None: all); the others are keys only. In a ``block`` each node attends to
    all nodes, regardless of their parents.
    """

    context: int = 0
    chain: int = 0
    parents: Ints = ()
    tree_rows: Ints | None = None
    block: bool = False

    @property
    def tree_start(self) -> int:
        """The first slot of the tree."""
        return self.context + self.chain

    @property
    def slots(self) -> int:
        """The used view slots."""
        return self.tree_start + len(self.parents)

    @property
    def nodes(self) -> Ints:
        """The tree nodes that are rows."""
        return tuple(range(len(self.parents))) if self.tree_rows is None else self.tree_rows

    def lineage(self, node: int) -> Ints:
        """Return the visible nodes of a node, rising: itself and its ancestors, or the block."""
        if self.block:
            return tuple(range(len(self.parents)))
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))


def _codes(pool: np.ndarray) -> np.ndarray:
    """Convert a pool to fp8; NaN remains NaN."""
    import torch

    return torch.from_numpy(pool).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


@dataclass(frozen=True)
class Launch:
    """The sequences of a launch and the geometry of the layer.

    With ``codes`` the pools hold e4m3.
    """

    branches: Sequence[Branch]
    kv_heads: int = 2
    group: int = 2
    width: int = 16
    v_width: int = 16
    page_size: int = 4
    window: int = 0
    sinks: bool = True
    view_per_head: bool = False
    selected: int = 0
    lists_per_head: bool = False
    whole_rows: int | None = None
    padding_rows: int = 2
    padding_pages: int = 1
    words: int = 0
    codes: bool = False

    @property
    def row_start(self) -> np.ndarray:
        """int32 [B + 1]."""
        counts = [branch.chain + len(branch.nodes) for branch in self.branches]
        return np.cumsum([0, *counts]).astype(np.int32)

    @property
    def attributes(self) -> dict[str, Any]:
        """The op's attributes."""
        return {"scale": self.width**-0.5, "window": self.window}

    def rows(self) -> list[tuple[int, Branch, int, Ints]]:
        """Return every row: sequence, branch, slot, and its visible nodes (() in the chain)."""
        rows: list[tuple[int, Branch, int, Ints]] = []
        for index, branch in enumerate(self.branches):
            rows += [(index, branch, branch.context + i, ()) for i in range(branch.chain)]
            rows += [
                (index, branch, branch.tree_start + node, branch.lineage(node))
                for node in branch.nodes
            ]
        return rows

    def arrays(self, rng: np.random.Generator) -> Arrays:
        """Return the op's inputs; slots that no sequence uses, and page 0, are NaN."""
        rows = self.rows()
        total = len(rows) + self.padding_rows
        q_heads = self.kv_heads * self.group
        views = self.kv_heads if self.view_per_head else 1
        batch = len(self.branches)
        needed = [-(-branch.slots // self.page_size) for branch in self.branches]
        table = np.zeros((batch, views, max(needed) + self.padding_pages), np.int32)
        pages = 1 + rng.permutation(sum(needed) * views).astype(np.int32)
        k, v = (
            np.full((len(pages) + 1, self.kv_heads, self.page_size, width), np.nan, np.float32)
            for width in (self.width, self.v_width)
        )
        used = 0
        for index, branch in enumerate(self.branches):
            for view in range(views):
                mine = pages[used : used + needed[index]]
                used += needed[index]
                table[index, view, : len(mine)] = mine
                slot = np.arange(branch.slots)
                heads = [view] if self.view_per_head else list(range(self.kv_heads))
                for head in heads:
                    where = (mine[slot // self.page_size], head, slot % self.page_size)
                    k[where] = rng.standard_normal((branch.slots, self.width))
                    v[where] = rng.standard_normal((branch.slots, self.v_width))
        q = np.full((total, q_heads, self.width), np.nan, np.float32)
        q[: len(rows)] = rng.standard_normal((len(rows), q_heads, self.width))
        row_slot = np.zeros(total, np.int32)
        row_slot[: len(rows)] = [slot for _, _, slot, _ in rows]
        tree_start = np.array([branch.tree_start for branch in self.branches], np.int32)
        sinks = rng.standard_normal(q_heads).astype(np.float32) if self.sinks else None
        chosen = self._selected(rng, total) if self.selected else None
        bits = self._ancestor_bits(total)
        if self.codes:
            k, v = _codes(k), _codes(v)
        return q, k, v, table, self.row_start, row_slot, tree_start, bits, sinks, chosen

    def _ancestor_bits(self, total: int) -> np.ndarray:
        nodes = max(len(branch.parents) for branch in self.branches)
        words = np.zeros((total, max(self.words, -(-nodes // 32), 1)), np.uint32)
        for row, (_, _, _, lineage) in enumerate(self.rows()):
            for node in lineage:
                words[row, node // 32] |= np.uint32(1 << (node % 32))
        return words.view(np.int32)

    def _selected(self, rng: np.random.Generator, total: int) -> np.ndarray:
        lists = self.kv_heads if self.lists_per_head else 1
        picks = np.full((total, lists, self.selected), -1, np.int32)
        for row, (_, branch, slot, _) in enumerate(self.rows()):
            others = np.delete(np.arange(branch.slots), slot)
            for mine in picks[row]:
                count = min(len(others), int(rng.integers(self.selected)))
                chosen = sorted([slot, *rng.choice(others, count, replace=False)])
                mine[: len(chosen)] = chosen
                if row % 3 == self.whole_rows:
                    mine[:] = [WHOLE, *[-1] * (self.selected - 1)]
        return picks

    def case(self, name: str) -> Case:
        """Return this launch as a case; padding rows are unspecified."""
        compare = {"attended": np.s_[: len(self.rows())]}
        return Case(name, self.arrays, self.attributes, compare=compare)


def chain_of(count: int) -> Ints:
    """Return the parents of a tree that is one path."""
    return tuple(range(-1, count - 1))


# A root with three children, two of which have children: siblings share a depth.
BUSHY = (-1, 0, 0, 0, 1, 1, 2, 4, 6, 6)
