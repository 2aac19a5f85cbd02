"""Named cases of KvWrite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case


def write(
    slots: Sequence[int],
    *,
    pages: int = 5,
    kv_heads: int = 2,
    page_size: int = 4,
    width: int = 8,
    padding_rows: int = 0,
) -> Case:
    """Writes to these slots; padding rows write to page 0, which is unspecified."""

    def make(rng: np.random.Generator) -> Arrays:
        pool = rng.standard_normal((pages, kv_heads, page_size, width)).astype(np.float32)
        rows = len(slots) + padding_rows
        new = rng.standard_normal((rows, kv_heads, width)).astype(np.float32)
        slot = np.array([*slots, *rng.integers(0, page_size, padding_rows)], np.int32)
        return pool, new, slot

    name = f"{len(slots)} rows, {padding_rows} padding, {kv_heads} heads, pages of {page_size}"
    return Case(
        name, make, atol=0, rtol=0, kernel_atol=0, kernel_rtol=0, compare={"pool_out": np.s_[1:]}
    )


CASES: tuple[Case, ...] = (
    write([9]),
    write([7, 8, 9, 4]),
    write([19, 4, 12, 11, 6], padding_rows=3),
    write([1, 2, 4], page_size=1, kv_heads=1),
    write(range(16, 48), pages=4, page_size=16, kv_heads=8, width=64),
)

KERNEL_CASES: tuple[Case, ...] = (
    write(range(64, 320), pages=6, page_size=64, kv_heads=1, width=32, padding_rows=1),
    write([64 * page + page for page in range(1, 9)], pages=9, page_size=64, width=64),
)
