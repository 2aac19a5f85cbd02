"""Named cases of ViewPositions."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case

POOL_SPARE = 7


def positions(
    name: str,
    seen: tuple[int | None, ...],
    *,
    pages: int = 9,
    held: int = 7,
    layers: int = 2,
    heads: int = 1,
    page_size: int = 16,
) -> Case:
    """Each sequence has ``held`` pages and attends to ``seen`` of them, or to all (None)."""
    pool = 1 + len(seen) * held + POOL_SPARE

    def make(rng: np.random.Generator) -> Arrays:
        own = 1 + rng.permutation(pool - 1)[: len(seen) * held].reshape(len(seen), held)
        table = np.zeros((len(seen), pages), np.int32)
        table[:, :held] = own
        views = np.zeros((layers, len(seen), heads, pages), np.int32)
        for layer in range(layers):
            for b, count in enumerate(seen):
                for head in range(heads):
                    chosen = np.sort(rng.permutation(held)[: held if count is None else count])
                    views[layer, b, head, : len(chosen)] = own[b, chosen]
        return table, views

    attributes = {"page_size": page_size, "pages": pool}
    return Case(name, make, attributes, atol=0, rtol=0, kernel_atol=0, kernel_rtol=0)


CASES: tuple[Case, ...] = (
    positions("whole and in part", (None, 3, 1)),
    positions("one layer, pages of 4", (5,), layers=1, page_size=4),
    positions("a sequence that sees nothing yet", (0, 4)),
    positions("heads of which the first counts", (4, 2), heads=3),
    positions("long tables", (None, 300), pages=2400, held=2300, layers=3),
)
