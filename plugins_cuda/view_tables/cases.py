"""Named cases of ViewTables."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case


def tables(
    name: str,
    viewed: str,
    *,
    layers: int = 2,
    heads: int = 2,
    pages: int = 9,
    entries: int = 5,
    idle: int = 1,
) -> Case:
    """One sequence per digit: 1 has a partial view; ``idle`` more have tables but no rows."""

    def make(rng: np.random.Generator) -> Arrays:
        batch = len(viewed)
        partial = rng.integers(1, 99, (layers, batch + idle, heads, entries))
        return (
            rng.integers(100, 999, (batch, pages)).astype(np.int32),
            partial.astype(np.int32),
            np.array([int(v) for v in viewed], np.int32),
        )

    return Case(name, make, atol=0, rtol=0, kernel_atol=0, kernel_rtol=0)


CASES: tuple[Case, ...] = (
    tables("full and partial", "0110"),
    tables("one sequence over a view", "1", idle=0, layers=1),
    tables("a view larger than the table", "10", entries=14),
    tables("long tables", "101", pages=600, entries=300, heads=3),
)
