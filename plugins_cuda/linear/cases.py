"""Named cases of Linear, and how other dense ops draw their weights and rows."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.packing import packed_shape

# Values of one large weight that are drawn; the rest of it repeats them, rescaled tile by tile.
_DRAWN_VALUES = 1 << 24


def draw(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Normal fp32 values."""
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


def draw_packed(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """A packed weight whose products with normed rows are about 1; any values are a valid one."""
    tiles, blocks, values = packed_shape(rows, columns)
    distinct = min(tiles, max(1, _DRAWN_VALUES // (blocks * values)))
    drawn = draw(rng, distinct, blocks, values, scale=columns**-0.5)
    if distinct == tiles:
        return drawn
    scales = rng.uniform(0.5, 1.0, (tiles, 1, 1)).astype(np.float32)
    return drawn[np.arange(tiles) % distinct] * scales


def linear(
    tokens: int,
    rows: int,
    columns: int,
    *,
    bias: bool = False,
    residual: bool = False,
    prefix: str = "",
) -> Case:
    """``tokens`` rows of ``columns`` values by a weight of ``rows`` rows."""

    def make(rng: np.random.Generator) -> Arrays:
        return (
            draw(rng, tokens, columns),
            draw_packed(rng, rows, columns),
            draw(rng, rows) if bias else None,
            draw(rng, tokens, rows) if residual else None,
        )

    extras = ", bias" * bias + ", residual" * residual
    return Case(f"{prefix}{tokens} rows, {columns} to {rows}{extras}", make, atol=1e-4)


CASES: tuple[Case, ...] = (
    linear(1, 64, 96, bias=True, residual=True),
    linear(3, 80, 224, residual=True),
    linear(8, 48, 32, bias=True),
    linear(5, 16, 160),
)

KERNEL_CASES: tuple[Case, ...] = (
    linear(11, 112, 544, bias=True, residual=True),
    linear(21, 144, 96, residual=True),
    linear(40, 80, 1056, bias=True),
    linear(75, 64, 64, residual=True),
    linear(2, 192, 192, bias=True, residual=True),
    linear(1, 80, 1216, bias=True, residual=True),
    *(linear(t, 2880, 4096, bias=True, residual=True, prefix="gpu: ") for t in (1, 4, 8, 64)),
    linear(1, 2880, 17280, residual=True, prefix="gpu: "),
    linear(8, 2880, 17280, residual=True, prefix="gpu: "),
    linear(4, 2880, 8640, prefix="gpu: "),
    linear(200, 2880, 4096, bias=True, residual=True, prefix="gpu: "),
)
