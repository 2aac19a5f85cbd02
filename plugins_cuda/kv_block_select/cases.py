"""Named cases of KvBlockSelect.

Queries and keys are small integers. Every score is then exact in any order of summation, and all
implementations have the same ties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case


@dataclass(frozen=True)
class Context:
    """One sequence: ``chain`` rows, a tree of ``tree`` rows, then ``unused`` rows.

    ``blocks`` are summarized; −1 keeps its table. ``tail_pages`` follow the last block.
    """

    blocks: int
    budget: int
    tree: int = 1
    chain: int = 0
    unused: int = 0
    tail_pages: int = 3


def select(
    name: str,
    *contexts: Context,
    sink_pages: int = 2,
    block_pages: int = 1,
    kv_heads: int = 2,
    group: int = 2,
    width: int = 16,
    entries: int = 12,
    largest: int = 3,
    padding_rows: int = 0,
    **attributes: Any,
) -> Case:
    """Unused summaries, and rows that are no queries, are NaN."""

    def integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
        return rng.integers(-largest, largest + 1, shape).astype(np.float32)

    def make(rng: np.random.Generator) -> Arrays:
        held = [sink_pages + max(c.blocks, 0) * block_pages + c.tail_pages for c in contexts]
        pages = 1 + rng.permutation(sum(held)).astype(np.int32)
        table = np.zeros((len(contexts), max(held)), np.int32)
        pool = np.full((len(pages) + 1, kv_heads, 2, width), np.nan, np.float32)
        rows = [c.chain + c.tree + c.unused for c in contexts]
        total = sum(rows) + padding_rows
        q = np.full((total, kv_heads * group, width), np.nan, np.float32)
        row_slot = np.zeros(total, np.int32)
        tree_start = rng.integers(40, 60, len(contexts)).astype(np.int32)
        used = first = 0
        for b, c in enumerate(contexts):
            table[b, : held[b]] = pages[used : used + held[b]]
            used += held[b]
            ends = sink_pages + block_pages * np.arange(max(c.blocks, 0))
            one, other = (integers(rng, len(ends), kv_heads, width) for _ in range(2))
            pool[table[b, ends]] = np.stack([np.maximum(one, other), np.minimum(one, other)], 2)
            q[first + c.chain : first + c.chain + c.tree] = integers(
                rng, c.tree, kv_heads * group, width
            )
            row_slot[first : first + rows[b]] = tree_start[b] - c.chain + np.arange(rows[b])
            first += rows[b]
        return (
            q,
            pool,
            table,
            np.cumsum([0, *rows]).astype(np.int32),
            row_slot,
            tree_start,
            np.array([c.tree for c in contexts], np.int32),
            np.array([c.blocks for c in contexts], np.int32),
            np.array([c.budget for c in contexts], np.int32),
            rng.integers(100, 200, (len(contexts), kv_heads, entries)).astype(np.int32),
        )

    all_attributes = {"sink_pages": sink_pages, "block_pages": block_pages, **attributes}
    return Case(name, make, all_attributes)


RAGGED = (Context(9, 4, tree=3, chain=2), Context(-1, 4, tree=2), Context(3, 5, tree=1, unused=2))

CASES: tuple[Case, ...] = (
    select("one of two", Context(2, 1)),
    select("the first block after the sink", Context(1, 4)),
    select("fewer blocks than the budget", Context(3, 6)),
    select("as many blocks as the budget", Context(5, 5, tree=2)),
    select("no block yet", Context(0, 4), entries=8),
    select("a context shorter than the sink", Context(0, 4, tail_pages=0), sink_pages=5),
    select("nothing to do", Context(-1, 3), Context(-1, 2)),
    select("ragged batch", *RAGGED, padding_rows=2),
    select("ragged batch, maximum", *RAGGED, padding_rows=2, reduction="max"),
    select("ragged batch, the root alone", *RAGGED, padding_rows=2, reduction="last"),
    select("ragged batch, Quest's bound", *RAGGED, padding_rows=2, score="quest"),
    select("Quest's bound, maximum", Context(8, 3, tree=4), score="quest", reduction="max"),
    select("ties", Context(9, 4, tree=2), width=8, largest=1),
    select("all scores equal", Context(9, 4), largest=0),
    select("no sink", Context(7, 3, chain=1), sink_pages=0),
    select("blocks of three pages", *RAGGED, block_pages=3, sink_pages=6, entries=30),
    select("the tail is cut", Context(6, 4, tail_pages=9), entries=9),
    select("eight query heads a KV head", Context(12, 5, tree=4), group=8, width=64, kv_heads=2),
    select("one KV head", Context(7, 2, tree=2), kv_heads=1, group=1),
)

KERNEL_CASES: tuple[Case, ...] = (
    select(
        "more blocks than threads",
        Context(1100, 60, tree=5), Context(700, 70, tree=2, chain=9),
        kv_heads=1, entries=90,
    ),
    select(
        "ties of more blocks than threads",
        Context(1300, 300, tree=1), kv_heads=1, group=1, width=8, largest=1, entries=310,
    ),
    select("a tree wider than a tile of queries", Context(20, 6, tree=21), reduction="max"),
    select("heads of 128", Context(40, 6, tree=3), width=128, group=8, kv_heads=1),
    select("sixteen heads of 128", Context(40, 6, tree=7), width=128, group=16, kv_heads=2),
    select("twelve query heads a KV head", Context(20, 6, tree=5), group=12, reduction="max"),
    select(
        "gpu: 8 sequences of 131k",
        *[Context(8170 - 13 * b, 256, tree=4) for b in range(8)],
        kv_heads=8, group=8, width=64, entries=280,
    ),
)  # fmt: skip
