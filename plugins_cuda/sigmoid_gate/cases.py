"""Named cases of SigmoidGate."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.cases import draw


def gate(
    tokens: int, width: int, *, gates: int = 0, column: int | None = None, prefix: str = ""
) -> Case:
    """``tokens`` rows; with ``gates``, the first of so many gates applies to the complete row.

    With ``column`` GELU of the gates multiplies columns from there on, of three times as many.
    """

    def make(rng: np.random.Generator) -> Arrays:
        columns = width if column is None else 3 * width
        return draw(rng, tokens, columns), draw(rng, tokens, gates or width, scale=3.0)

    extras = ", a gate a row" if gates else "" if column is None else f", GELU, from {column} on"
    attributes = {
        "per_row": int(gates > 0),
        "activation": "sigmoid" if column is None else "gelu_tanh",
        "column": column or 0,
    }
    return Case(f"{prefix}{tokens} rows of {width}{extras}", make, attributes, atol=1e-6)


CASES: tuple[Case, ...] = (
    gate(1, 8),
    gate(5, 96),
    gate(70, 48),
    gate(5, 96, gates=16),
    gate(5, 32, column=64),
    gate(3, 16, column=0),
)

KERNEL_CASES: tuple[Case, ...] = (
    gate(4, 6144, prefix="gpu: "),
    gate(256, 512, gates=16, prefix="gpu: "),
    gate(64, 256, column=512, prefix="gpu: "),
)
