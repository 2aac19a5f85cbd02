"""Named cases of WeighHeads."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case


def weigh(rows: int, heads: int, width: int) -> Case:
    """Weights of both signs."""

    def make(rng: np.random.Generator) -> Arrays:
        shapes = (rows, heads, width), (rows, heads)
        return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)

    return Case(f"{rows} rows, {heads} heads of {width}", make, atol=0, rtol=0)


CASES: tuple[Case, ...] = (weigh(1, 1, 16), weigh(5, 4, 64), weigh(33, 3, 48))
