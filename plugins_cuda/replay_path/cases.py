"""Named cases of ReplayPath."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case

KEPT = 7


def replay(
    name: str, starts: list[int], *, rows: int = 5, path: int = 4, stores: bool = False
) -> Case:
    """Sequences whose first rows are at the positions ``starts``; −1 means no rows."""
    batch = len(starts)

    def make(rng: np.random.Generator) -> Arrays:
        counts = [0 if start < 0 else rows for start in starts]
        positions = [start for start in starts if start >= 0 for _ in range(rows)]
        has_tree = path > 0 and not stores
        return (
            rng.integers(0, rows, (batch, path)).astype(np.int32) if has_tree else None,
            rng.integers(0, path, batch).astype(np.int32) if has_tree else None,
            np.array(positions, np.int32),
            np.cumsum([0, *counts]).astype(np.int32),
            rng.integers(0, 99, (batch, KEPT)).astype(np.int32),
            rng.integers(0, KEPT, batch).astype(np.int32),
        )

    return Case(name, make, {"stores": int(stores)}, kernel_atol=0, kernel_rtol=0)


CASES: tuple[Case, ...] = (
    replay("trees", [5, 9, 2]),
    replay("trees beside padding", [5, 0, 2, 0]),
    replay("without a tree", [3, 0, 1], rows=1, path=0),
    replay("prompts", [0, -1, 64], rows=2, stores=True),
    replay("long paths", [5], rows=40, path=7),
)
