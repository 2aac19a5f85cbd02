"""Named cases of PagedTreeAttention, from a description of what each sequence brings along."""

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

    ``context`` slots are filled already, ``chain`` rows follow them causally, and then a tree
    stands: ``parents[j]`` is the parent node of node j, -1 for none. ``tree_rows`` are the
    nodes that are rows of this launch (None: all); the others are keys only.
    """

    context: int = 0
    chain: int = 0
    parents: Ints = ()
    tree_rows: Ints | None = None

    @property
    def tree_start(self) -> int:
        """The first slot of the tree."""
        return self.context + self.chain

    @property
    def slots(self) -> int:
        """The view slots in use."""
        return self.tree_start + len(self.parents)

    @property
    def nodes(self) -> Ints:
        """The tree nodes that are rows."""
        return tuple(range(len(self.parents))) if self.tree_rows is None else self.tree_rows

    def lineage(self, node: int) -> Ints:
        """A node and its ancestors, rising."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return tuple(reversed(found))


@dataclass(frozen=True)
class Launch:
    """The sequences of a launch and the geometry of the layer."""

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
        """Every row: sequence, its branch, slot, and its lineage in the tree (() in the chain)."""
        found: list[tuple[int, Branch, int, Ints]] = []
        for index, branch in enumerate(self.branches):
            found += [(index, branch, branch.context + i, ()) for i in range(branch.chain)]
            found += [
                (index, branch, branch.tree_start + node, branch.lineage(node))
                for node in branch.nodes
            ]
        return found

    def arrays(self, rng: np.random.Generator) -> Arrays:
        """The op's inputs; every slot that no sequence uses holds NaN, page 0 as a whole."""
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
        """This launch as a case; padding rows are unspecified."""
        compare = {"attended": np.s_[: len(self.rows())]}
        return Case(name, self.arrays, self.attributes, compare=compare)


def chain_of(count: int) -> Ints:
    """The parents of a tree that is one path."""
    return tuple(range(-1, count - 1))


# A root with three children, two of which have children of their own: siblings share a depth.
BUSHY = (-1, 0, 0, 0, 1, 1, 2, 4, 6, 6)


def _opposed(launch: Launch, sink: float, rng: np.random.Generator) -> Arrays:
    """All scores equal −``sink``."""
    q, k, v, *middle, _, selected = launch.arrays(rng)
    assert q is not None and k is not None
    side = (abs(sink) / launch.attributes["scale"] / launch.width) ** 0.5
    keys = np.where(np.isnan(k), k, np.float32(-side * np.sign(sink)))
    queries = np.where(np.isnan(q), q, np.float32(side))
    return queries, keys, v, *middle, np.full(q.shape[1], sink, np.float32), selected


def _with_sinks(name: str, sink: float) -> Case:
    launch = Launch([Branch(9, 0, BUSHY), Branch(0, 5)], window=4)
    return Case(
        name,
        lambda rng: _opposed(launch, sink, rng),
        launch.attributes,
        compare={"attended": np.s_[: len(launch.rows())]},
    )


_LAUNCHES = {
    "one token, nothing before it": Launch([Branch(0, 1)], padding_rows=0, padding_pages=0),
    "decode": Launch([Branch(13, 1)], padding_rows=0),
    "decode, ragged batch": Launch([Branch(13, 1), Branch(0, 1), Branch(31, 1)]),
    "decode at a page boundary": Launch([Branch(7, 1), Branch(8, 1)], padding_pages=0),
    "prefill from nothing": Launch([Branch(0, 19)]),
    "prefill chunk after context": Launch([Branch(6, 9), Branch(0, 3)]),
    "prefill without sinks": Launch([Branch(3, 9)], sinks=False),
    "prefill, window shorter than the context": Launch([Branch(11, 9)], window=5),
    "prefill, window longer than the context": Launch([Branch(3, 4)], window=64),
    "decode, window of one": Launch([Branch(9, 1), Branch(2, 1)], window=1),
    "verify chain": Launch([Branch(10, 0, chain_of(4))], padding_rows=0),
    "verify tree": Launch([Branch(10, 0, BUSHY)]),
    "verify tree at the very start": Launch([Branch(0, 0, BUSHY)]),
    "verify trees, ragged": Launch(
        [Branch(10, 0, BUSHY), Branch(3, 0, (-1,)), Branch(25, 0, chain_of(5))]
    ),
    "window by node depth, siblings": Launch([Branch(10, 0, BUSHY)], window=3),
    "window of two inside the tree": Launch([Branch(5, 0, BUSHY), Branch(1, 2)], window=2),
    "sequences without rows": Launch([Branch(4, 0), Branch(6, 2, BUSHY), Branch(0, 0)]),
    "chain, then tree": Launch([Branch(5, 4, BUSHY), Branch(0, 7, chain_of(3))], window=6),
    "draft level 1": Launch([Branch(9, 0, (-1, -1, -1)), Branch(4, 0, (-1, -1))]),
    "draft level 3": Launch(
        [Branch(9, 0, (-1, -1, -1, 0, 0, 2, 3, 5, 5), (6, 7, 8))], window=4, group=1
    ),
    "bits 31 and 32": Launch([Branch(6, 0, chain_of(35)), Branch(2, 0, BUSHY)], window=33),
    "three words, more than needed": Launch([Branch(6, 0, chain_of(33))], words=3),
    "grouped query 8 of width 64": Launch(
        [Branch(40, 0, BUSHY), Branch(70, 1)], group=8, width=64, v_width=64, page_size=16
    ),
    "tiles fully masked by the window": Launch(
        [Branch(300, 0, BUSHY), Branch(150, 3)], window=4, page_size=16
    ),
    "multi-query, wider keys than values": Launch(
        [Branch(7, 2, BUSHY)], kv_heads=1, group=4, width=24, v_width=8
    ),
    "a view per KV head": Launch(
        [Branch(10, 2, BUSHY), Branch(5, 1)], view_per_head=True, kv_heads=3
    ),
    "a view per KV head, one sequence": Launch([Branch(9, 0, BUSHY)], view_per_head=True),
    "selected slots": Launch([Branch(20, 3, BUSHY), Branch(4, 2)], selected=6),
    "selected slots, window, view per head": Launch(
        [Branch(20, 0, BUSHY)], selected=9, window=7, view_per_head=True, sinks=False
    ),
    "selected slots, a list per KV head": Launch(
        [Branch(20, 0, BUSHY), Branch(9, 2)], selected=7, lists_per_head=True, view_per_head=True
    ),
    "selected slots, lists per KV head, one sequence": Launch(
        [Branch(20, 3, BUSHY)], selected=7, lists_per_head=True, kv_heads=3
    ),
    "selected slots, some rows whole": Launch(
        [Branch(20, 3, BUSHY), Branch(4, 2)], selected=6, whole_rows=1
    ),
    "selected slots, all rows whole": Launch([Branch(20, 1)], selected=3, whole_rows=0),
}

CASES: tuple[Case, ...] = (
    *(launch.case(name) for name, launch in _LAUNCHES.items()),
    _with_sinks("sink far above every score", 80.0),
    _with_sinks("sink far below every score", -80.0),
)

_KERNEL_LAUNCHES = {
    "example geometry, 6 on 2 heads of 32": Launch(
        [Branch(37, 0, BUSHY), Branch(64, 1), Branch(0, 3)], group=3, width=32, v_width=32,
        page_size=16,
    ),
    "heads of 128": Launch(
        [Branch(50, 3, chain_of(3))], group=8, width=128, v_width=128, page_size=16, kv_heads=1
    ),
    "more rows than a CTA takes": Launch(
        [Branch(30, 0, (*BUSHY, *range(9, 24))), Branch(3, 0, chain_of(2))], page_size=32
    ),
    "one sequence has nearly all rows": Launch(
        [Branch(2, 1), Branch(70, 21), Branch(5, 1), Branch(9, 0)], page_size=64, window=40
    ),
    "many rows of one sequence, few of others": Launch(
        [Branch(2, 1), Branch(270, 61, BUSHY), Branch(5, 0, chain_of(3)), Branch(9, 0)], group=8,
        width=64, v_width=64, page_size=64, padding_pages=130,
    ),
    "several rows, capacity for a long context": Launch(
        [Branch(270 - 31 * b, 0, BUSHY[:7]) for b in range(7)], kv_heads=1, group=8, width=64,
        v_width=64, page_size=64, padding_pages=1020,
    ),
    "a tree behind rows, capacity for a long context": Launch(
        [Branch(270, 6, BUSHY), Branch(140, 3, BUSHY)], kv_heads=1, group=8, width=64, v_width=64,
        page_size=16, padding_pages=4096,
    ),
    "a view per KV head, many rows": Launch(
        [Branch(310, 13, (*BUSHY, *range(9, 24)))], view_per_head=True, group=4, width=64,
        v_width=64, page_size=32, padding_pages=250, sinks=False,
    ),
    "longer than the context's splits": Launch(
        [Branch(4300, 0, BUSHY)], kv_heads=1, page_size=64, padding_rows=0
    ),
    "selected slots of several chunks": Launch(
        [Branch(700, 0, BUSHY), Branch(500, 2)], kv_heads=1, group=8, page_size=64, selected=600,
        whole_rows=2,
    ),
    "prompt chunks over several tiles, heads of 64": Launch(
        [Branch(420, 40), Branch(0, 25), Branch(130, 3, BUSHY), Branch(255, 1)], kv_heads=2,
        group=8, width=64, v_width=64, page_size=32,
    ),
    "a window that is split": Launch(
        [Branch(1700, 0, chain_of(3))], kv_heads=1, page_size=64, window=1500
    ),
}  # fmt: skip


def _real(branches: Sequence[Branch], **changes: Any) -> Launch:
    """GPT-OSS's heads and pages."""
    return Launch(
        branches, kv_heads=8, group=8, width=64, v_width=64, page_size=64, **changes
    )  # fmt: skip


_GPU_LAUNCHES = {
    "decode at 1k": _real([Branch(1023, 1)], padding_rows=0),
    "decode at 32k": _real([Branch(32767, 1)], padding_rows=0),
    "decode at 131k": _real([Branch(131071, 1)], padding_rows=0),
    "decode at 4k, window": _real([Branch(4090, 1)], window=128, padding_rows=0),
    "verify a chain of 4 at 1k": _real([Branch(1000, 0, chain_of(4))], padding_rows=0),
    "verify a tree of 10 at 32k": _real([Branch(32700, 0, BUSHY)], padding_rows=0),
    "verify a tree of 10 at 1k, window": _real(
        [Branch(1000, 0, BUSHY)], window=128, padding_rows=0
    ),
    "16 sequences at 1k": _real([Branch(960 + 8 * b, 1) for b in range(16)], padding_rows=0),
    "verify 16 sequences, ragged": _real(
        [Branch(100 + 211 * b, 0, chain_of(1 + b % 4)) for b in range(16)]
    ),
    "64 sequences, window": _real(
        [Branch(17 * b, 1) for b in range(64)], window=128, padding_rows=0
    ),
    "a refresh: 48 tokens and a chain at 131k": _real(
        [Branch(131000, 48, chain_of(4))], padding_rows=12
    ),
    "a refresh of one in a batch": _real(
        [Branch(20000, 48, chain_of(4)), *(Branch(4100 + b, 0, chain_of(4)) for b in range(7))]
    ),
    "verify a tree of 8 at 66k": _real([Branch(66000, 0, BUSHY[:8])], padding_rows=0),
    "8 trees of 8 nodes at 9k to 30k": _real(
        [Branch(9000 + 3000 * b, 0, BUSHY[:8]) for b in range(8)], padding_rows=0
    ),
    "trees of 24 nodes at 9k": _real(
        [Branch(9000 + 40 * b, 0, (*BUSHY, *range(9, 24))) for b in range(3)], padding_rows=0
    ),
    "selected: 2116 of 131k": _real([Branch(131071, 1)], selected=2148, padding_rows=0),
    "selected: a chain of 4 at 131k": _real(
        [Branch(131000, 0, chain_of(4))], selected=2148, padding_rows=0
    ),
    "selected: thousands of 131k": _real(
        [Branch(131071, 1), Branch(20000, 0, chain_of(4))], selected=20000, padding_rows=0
    ),
    "selected: 8 chains of 4 at 8k, some whole": _real(
        [Branch(8000 + 31 * b, 0, chain_of(4)) for b in range(8)], selected=2148, whole_rows=1
    ),
    "prompt chunk of 500 at 1k": _real([Branch(1000, 500)]),
    "prompt chunks, ragged, window": _real([Branch(0, 300), Branch(777, 130)], window=128),
}

KERNEL_CASES: tuple[Case, ...] = (
    *(launch.case(name) for name, launch in _KERNEL_LAUNCHES.items()),
    *(launch.case(f"gpu: {name}") for name, launch in _GPU_LAUNCHES.items()),
)
