"""Named cases of SigmoidGate."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.cases import draw


def gate(tokens: int, width: int, *, gates: int = 0, prefix: str = "") -> Case:
    """``tokens`` rows; with ``gates``, the first of so many gates applies to the complete row."""

    def make(rng: np.random.Generator) -> Arrays:
        return draw(rng, tokens, width), draw(rng, tokens, gates or width, scale=3.0)

    name = f"{prefix}{tokens} rows of {width}{', a gate a row' if gates else ''}"
    return Case(name, make, {"per_row": int(gates > 0)}, atol=1e-6)


CASES: tuple[Case, ...] = (
    gate(1, 8),
    gate(5, 96),
    gate(70, 48),
    gate(5, 96, gates=16),
)

KERNEL_CASES: tuple[Case, ...] = (
    gate(4, 6144, prefix="gpu: "),
    gate(256, 512, gates=16, prefix="gpu: "),
)
