"""Named cases of PathCommit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case

Sequences = Sequence[tuple[int, Sequence[int]]]


def commit(
    name: str,
    sequences: Sequences,
    *,
    parts: int = 4,
    kv_heads: int = 2,
    page_size: int = 4,
    width: int = 8,
    tree_slots: int = 12,
    fp8: bool = False,
) -> Case:
    """Commit (length, path) per sequence; shorter paths are padded with -1.

    Every sequence owns the pages of ``length + tree_slots`` slots, scattered over the pool.
    """
    deepest = max(len(path) for _, path in sequences)
    paths = [[*path, *[-1] * (deepest - len(path))] for _, path in sequences]
    needed = [-(-(length + tree_slots) // page_size) for length, _ in sequences]

    def make(rng: np.random.Generator) -> Arrays:
        pages = 1 + rng.permutation(sum(needed)).astype(np.int32)
        table = np.zeros((len(sequences), max(needed) + 1), np.int32)
        for row, mine in enumerate(np.split(pages, np.cumsum(needed)[:-1])):
            table[row, : len(mine)] = mine
        shape = (parts, len(pages) + 1, kv_heads, page_size, width)
        pools = rng.standard_normal(shape).astype(np.float32)
        if fp8:
            pools = rng.integers(0, 256, shape, np.uint8)
        lengths = np.array([length for length, _ in sequences], np.int32)
        return pools, np.array(paths, np.int32), lengths, table

    return Case(
        name,
        make,
        atol=0,
        rtol=0,
        kernel_atol=0,
        kernel_rtol=0,
        compare={"pools_out": np.s_[:, 1:]},
    )


CASES: tuple[Case, ...] = (
    commit("contiguous already", [(5, [0, 1, 2])]),
    commit("root alone", [(9, [0])]),
    commit("nothing accepted, padding", [(3, [0, -1, -1]), (0, [-1, -1, -1])]),
    commit("one branch", [(7, [0, 2, 5])]),
    commit("sources are targets, over pages", [(6, [0, 2, 3, 4, 5])], parts=2),
    commit("from the very start", [(0, [0, 3, 11])]),
    commit("ragged batch", [(13, [0, 2]), (4, [0, 1, 4, 9]), (21, [0]), (8, [0, 3, 7])]),
    commit("pages of 16, width 64", [(30, [0, 3, 4]), (16, [0, 1, 2])], page_size=16, width=64),
    commit("pages of one slot", [(3, [0, 2, 3])], page_size=1, kv_heads=1, tree_slots=5),
)

KERNEL_CASES: tuple[Case, ...] = (
    commit("a path of 33 nodes", [(40, [0, *range(2, 34)])], parts=2, tree_slots=40),
    commit("gpu: bytes of fp8", [(7, [0, 2, 5]), (30, [0, 3, 4])], kv_heads=1, width=48, fp8=True),
    commit(
        "gpu: 12 layers of 8 heads of 64, batch 16",
        [(1000 + 37 * b, [0, 2, 3, 6, 7, 8, 11, 12, 15]) for b in range(16)],
        parts=24,
        kv_heads=8,
        page_size=64,
        width=64,
        tree_slots=60,
    ),
)
