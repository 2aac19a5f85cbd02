"""Named cases of KvCommit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case

Pairs = Sequence[tuple[int, int]]


def commit(
    name: str, *sequences: Pairs, page_size: int = 4, kv_heads: int = 2, width: int = 8
) -> Case:
    """One list of (from, to) per sequence; shorter lists are padded with (-1, -1)."""
    length = max(len(pairs) for pairs in sequences)
    padded = [[*pairs, *[(-1, -1)] * (length - len(pairs))] for pairs in sequences]

    def make(rng: np.random.Generator) -> Arrays:
        pool = rng.standard_normal((7, kv_heads, page_size, width)).astype(np.float32)
        slots = np.array(padded, np.int32)
        return pool, slots[..., 0].copy(), slots[..., 1].copy()

    return Case(
        name, make, atol=0, rtol=0, kernel_atol=0, kernel_rtol=0, compare={"pool_out": np.s_[1:]}
    )


CASES: tuple[Case, ...] = (
    commit("one pair", [(6, 5)]),
    commit("contiguous already", [(4, 4), (5, 5), (6, 6)]),
    commit("padding only", [(-1, -1), (-1, -1)]),
    commit("down by one, overlapping", [(4, 4), (6, 5), (7, 6), (8, 7)]),
    commit("a cycle", [(5, 6), (6, 7), (7, 5)]),
    commit("to is another's from", [(9, 8), (10, 9), (12, 10)]),
    commit("half a pair is padding", [(6, -1), (-1, 9), (11, 10)]),
    commit("ragged batch over pages", [(6, 5), (18, 7)], [(25, 21)], [], kv_heads=1),
    commit("pages of one slot", [(3, 2), (5, 3)], page_size=1),
)

KERNEL_CASES: tuple[Case, ...] = (
    commit("more pairs than threads", [(4 + i, 5 + i) for i in range(20)], [(26, 25), (27, 26)]),
    commit("heads of 64", [(6, 5), (7, 6)], [(18, 17)], width=64),
)
