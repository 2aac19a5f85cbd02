"""Named cases of RmsSwiglu."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.cases import draw, draw_packed
from specbuild.plugins_cuda.linear.storage import BF16, FP8, MXFP4, Storage


def swiglu(
    tokens: int,
    columns: int,
    inner: int,
    *,
    bias: bool = False,
    storage: Storage = BF16,
    norm: bool = True,
    rounding: str = "llama",
    activation: str = "swiglu",
    prefix: str = "",
) -> Case:
    """``tokens`` rows of ``columns`` values into an MLP of width ``inner``."""

    def make(rng: np.random.Generator) -> Arrays:
        return (
            draw(rng, tokens, columns, scale=3.0 if norm else 1.0),
            draw(rng, columns) if norm else None,
            draw_packed(rng, 2 * inner, columns, storage),
            draw(rng, 2 * inner) if bias else None,
        )

    name = (
        f"{prefix}{tokens} rows, {columns} to {inner}"
        + ", bias" * bias
        + f", {storage.name}" * storage.scaled
        + f", {rounding} norm" * (rounding != "llama")
        + ", no norm" * (not norm)
        + f", {activation}" * (activation != "swiglu")
    )
    attributes = {"eps": 1e-5, "rounding": rounding, "activation": activation}
    return Case(name, make, attributes, atol=1e-4)


CASES: tuple[Case, ...] = (
    swiglu(1, 192, 64),
    swiglu(5, 96, 24),
    swiglu(8, 32, 8),
    swiglu(3, 64, 16, bias=True),
    swiglu(4, 96, 16, rounding="offset"),
    swiglu(3, 96, 16, norm=False),
    swiglu(3, 64, 16, rounding="offset", activation="geglu_tanh"),
)

KERNEL_CASES: tuple[Case, ...] = (
    swiglu(3, 96, 40, storage=FP8),
    # Sums of several chunks that are added at once; the last chunk is a short one.
    swiglu(2, 544, 88, bias=True, storage=MXFP4),
    swiglu(3, 544, 104),
    swiglu(9, 1056, 72, bias=True),
    swiglu(40, 1280, 40, bias=True),
    swiglu(11, 224, 136),
    swiglu(42, 1056, 40),
    swiglu(21, 96, 24, rounding="offset"),
    # Without a norm: tokens as rows, as fragments, and as panels from rows.
    swiglu(2, 9216, 8, norm=False),
    swiglu(21, 1056, 40, norm=False),
    swiglu(40, 1280, 40, norm=False, activation="geglu_tanh"),
    swiglu(52, 1280, 104),
    # Quantized weights: all of K for 32 tokens, twice, and an odd number of blocks.
    swiglu(52, 1280, 104, storage=MXFP4),
    swiglu(35, 544, 72, storage=FP8),
    *(swiglu(t, 2880, 17280, prefix="gpu: ") for t in (1, 4, 8, 40, 64)),
    swiglu(200, 2880, 17280, prefix="gpu: "),
    *(swiglu(t, 4096, 14336, prefix="gpu: ") for t in (1, 8, 64)),
    swiglu(4, 4096, 14336, bias=True, prefix="gpu: "),
    *(
        swiglu(t, 2880, 17280, storage=form, prefix="gpu: ")
        for form in (MXFP4, FP8)
        for t in (5, 16, 64, 80)
    ),
)
