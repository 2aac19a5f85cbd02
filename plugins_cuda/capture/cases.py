"""Named cases of Capture."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.cases import draw


def capture(tokens: int, width: int, column: int, *, columns: int = 3, prefix: str = "") -> Case:
    """``tokens`` rows, written to one of ``columns`` columns."""

    def make(rng: np.random.Generator) -> Arrays:
        return draw(rng, tokens, width), draw(rng, tokens, columns * width)

    name = f"{prefix}{tokens} rows of {width} into column {column} of {columns}"
    attributes = {"column": column}
    return Case(name, make, attributes, atol=0, rtol=0, kernel_atol=0, kernel_rtol=0)


CASES: tuple[Case, ...] = (
    capture(1, 32, 0),
    capture(7, 192, 2),
    capture(4, 96, 0, columns=1),
)

KERNEL_CASES: tuple[Case, ...] = (
    capture(3, 2880, 1),
    capture(64, 2880, 2, prefix="gpu: "),
)
