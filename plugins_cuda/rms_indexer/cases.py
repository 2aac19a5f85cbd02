"""Named cases of RmsIndexer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.cases import draw, draw_packed
from specbuild.plugins_cuda.linear.packing import TILE_ROWS


@dataclass(frozen=True)
class Sizes:
    """Heads of one width, and whether their weights are projected too."""

    heads: int = 3
    width: int = 32
    weighted: bool = True


_TINY = Sizes()
REAL = Sizes(heads=4, width=256)


def index(
    tokens: int,
    columns: int,
    sizes: Sizes = _TINY,
    norm: bool = True,
    page_size: int = 16,
    padding: int = 0,
    prefix: str = "",
) -> Case:
    """``tokens`` rows; the last ``padding`` of them write to page 0."""
    live = tokens - padding
    pages = 2 + -(-live // page_size)
    weights = -(-sizes.heads // TILE_ROWS) * TILE_ROWS if sizes.weighted else 0
    rows = (sizes.heads + 1) * sizes.width + weights

    def make(rng: np.random.Generator) -> Arrays:
        slots = page_size + rng.permutation((pages - 1) * page_size)[:live]
        slots = np.concatenate([slots, rng.integers(0, page_size, padding)])
        return (
            draw(rng, tokens, columns, scale=3.0 if norm else 1.0),
            draw(rng, columns) if norm else None,
            draw_packed(rng, rows, columns),
            slots.astype(np.int32),
            draw(rng, pages, 1, page_size, sizes.width),
        )

    extras = ", norm" * norm + f", {padding} padding" * (padding > 0)
    name = (
        f"{prefix}{tokens} rows of {columns}, {sizes.heads} heads of {sizes.width}, pages of "
        f"{page_size}{'' if sizes.weighted else ', not weighted'}{extras}"
    )
    return Case(
        name,
        make,
        {"heads": sizes.heads, "eps": 1e-5},
        atol=1e-4,
        compare={"key_pool_out": np.s_[1:]},
    )


CASES: tuple[Case, ...] = (
    index(1, 192),
    index(5, 96, padding=2),
    index(8, 160, Sizes(1, 16, weighted=False), norm=False),
)

KERNEL_CASES: tuple[Case, ...] = (
    index(11, 544, padding=3),
    index(37, 96, Sizes(18, 16), norm=False, padding=4),
    index(20, 96, Sizes(1, 64, weighted=False)),
    index(35, 1280, padding=2),
    *(index(t, 2880, REAL, page_size=64, prefix="gpu: ") for t in (1, 4, 8, 64)),
    index(200, 2880, REAL, page_size=64, padding=8, prefix="gpu: "),
)
