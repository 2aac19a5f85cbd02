"""Named cases of LinearPartial: those of Linear without residuals and repeated formats."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.cases import draw, draw_packed
from specbuild.plugins_cuda.linear.storage import BF16, FP8, MXFP4, Storage


def linear_partial(
    tokens: int, rows: int, columns: int, *, storage: Storage = BF16, prefix: str = ""
) -> Case:
    """``tokens`` rows of ``columns`` values, multiplied by a weight of ``rows`` rows."""

    def make(rng: np.random.Generator) -> Arrays:
        return draw(rng, tokens, columns), draw_packed(rng, rows, columns, storage)

    name = f"{prefix}{tokens} rows, {columns} to {rows}" + f", {storage.name}" * storage.scaled
    # Nothing is rounded: only the order of the sum differs.
    return Case(name, make, atol=1e-4, kernel_atol=1e-4, kernel_rtol=1e-5)


CASES: tuple[Case, ...] = (
    linear_partial(1, 64, 96),
    linear_partial(5, 16, 160),
    linear_partial(8, 48, 32),
)

KERNEL_CASES: tuple[Case, ...] = (
    linear_partial(2, 16, 9216, storage=MXFP4),
    linear_partial(3, 80, 224, storage=FP8),
    linear_partial(21, 144, 96),
    linear_partial(40, 80, 1056),
    linear_partial(33, 208, 1280),
    linear_partial(40, 80, 1888, storage=MXFP4),
    *(linear_partial(t, 2880, 2048, prefix="gpu: ") for t in (1, 4, 8, 40, 64, 256)),
    *(linear_partial(t, 4096, 7168, prefix="gpu: ") for t in (1, 8, 64)),
    *(linear_partial(t, 2880, 1440, storage=MXFP4, prefix="gpu: ") for t in (1, 16, 200)),
)
