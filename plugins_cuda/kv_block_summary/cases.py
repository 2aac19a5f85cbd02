"""Named cases of KvBlockSummary."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case

Range = tuple[int, int]


def summary(
    name: str,
    *ranges: Range,
    sink_pages: int = 1,
    block_pages: int = 1,
    page_size: int = 4,
    kv_heads: int = 2,
    width: int = 16,
    logical: int = 0,
) -> Case:
    """A sequence per (first block, blocks); pages without keys of the sequence are NaN."""

    def make(rng: np.random.Generator) -> Arrays:
        ends = [sink_pages + max(end, 0) * block_pages for _, end in ranges]
        pages = 1 + rng.permutation(sum(ends)).astype(np.int32)
        table = np.zeros((len(ranges), max(*ends, logical, 1)), np.int32)
        k = np.full((len(pages) + 2, kv_heads, page_size, width), np.nan, np.float32)
        used = 0
        for row, end in zip(table, ends, strict=True):
            row[:end] = pages[used : used + end]
            used += end
            k[row[sink_pages:end]] = rng.standard_normal(
                (end - sink_pages, kv_heads, page_size, width)
            )
        before = rng.standard_normal((len(k), kv_heads, 2, width)).astype(np.float32)
        first, blocks = np.array(ranges, np.int32).T
        return before, k, table, first.copy(), blocks.copy()

    return Case(
        name,
        make,
        {"sink_pages": sink_pages, "block_pages": block_pages},
        atol=0,
        rtol=0,
        kernel_atol=0,
        kernel_rtol=0,
        compare={"summary_pool_out": np.s_[1:]},
    )


CASES: tuple[Case, ...] = (
    summary("the first block after the sink", (0, 1)),
    summary("one more block", (3, 4)),
    summary("nothing new", (4, 4), logical=7),
    summary("a sequence that is left alone", (2, -1), (0, 3)),
    summary("no block yet", (0, 0), (0, 0)),
    summary("blocks of three pages, ragged", (0, 5), (2, 3), (4, 4), block_pages=3, sink_pages=6),
    summary("no sink", (0, 4), sink_pages=0, block_pages=2),
    summary("one key a page", (1, 6), page_size=1, block_pages=4, kv_heads=1),
    summary("all keys below zero would show", (0, 2), width=64, kv_heads=8, page_size=16),
)

KERNEL_CASES: tuple[Case, ...] = (
    summary("more blocks than warps", (0, 40), (7, 30), kv_heads=1, width=32),
    summary("heads of 128", (0, 3), width=128, page_size=16),
    summary(
        "gpu: the first step after a prompt of 32k",
        (0, 2000), (1990, 2000),
        sink_pages=2, page_size=16, kv_heads=8, width=64,
    ),
)  # fmt: skip
