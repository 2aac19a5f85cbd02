"""Named cases of RmsHead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.cases import draw, draw_packed
from specbuild.plugins_cuda.linear.packing import TILE_ROWS
from specbuild.plugins_cuda.linear.storage import BF16, FP8, MXFP4, Storage


def chosen_rows(
    rng: np.random.Generator, tokens: int, columns: int, logit_rows: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``x`` [tokens, columns], NaN in unused rows, and ``logit_rows`` as int32."""
    x = draw(rng, tokens, columns, scale=3.0)
    x[np.setdiff1d(np.arange(tokens), logit_rows)] = np.nan
    return x, np.array(logit_rows, np.int32)


def head(
    tokens: int,
    logit_rows: Sequence[int],
    columns: int,
    vocab: int,
    *,
    rounding: str = "gpt_oss",
    divisor: float = 1.0,
    cap: float = 0.0,
    storage: Storage = BF16,
    prefix: str = "",
) -> Case:
    """Compute the logits of ``logit_rows`` among ``tokens`` rows."""

    def make(rng: np.random.Generator) -> Arrays:
        x, rows = chosen_rows(rng, tokens, columns, logit_rows)
        padded = -(-vocab // TILE_ROWS) * TILE_ROWS
        return x, rows, draw(rng, columns), draw_packed(rng, padded, columns, storage)

    name = f"{prefix}{len(logit_rows)} of {tokens} rows, {columns} to {vocab}, {rounding}"
    name += f", {storage.name}" * storage.scaled
    name += f", over {divisor:g}" * (divisor != 1) + f", capped at {cap:g}" * (cap > 0)
    attributes = {
        "eps": 1e-5,
        "rounding": rounding,
        "divisor": divisor,
        "cap": cap,
        "vocab_size": vocab if vocab % TILE_ROWS else 0,
    }
    # The logits are not rounded; a normalized value may be rounded differently.
    return Case(name, make, attributes, atol=1e-4, kernel_atol=3e-3, kernel_rtol=1e-3)


CASES: tuple[Case, ...] = (
    head(1, [0], 96, 64),
    head(7, [6, 2, 2], 192, 80, rounding="llama"),
    head(5, [4, 1], 96, 48, rounding="offset"),
    head(9, range(9), 32, 48),
    head(3, range(3), 96, 48, divisor=0.7),
    head(3, range(3), 96, 48, cap=3.0),
    head(3, range(3), 96, 37),
)

KERNEL_CASES: tuple[Case, ...] = (
    head(9, [8, *range(7), 3], 224, 112, storage=MXFP4),
    head(20, [19, *range(11), 3], 544, 848),
    head(40, range(39, -1, -1), 160, 112, rounding="llama"),
    head(64, range(64), 864, 592),
    head(40, range(40), 160, 112, divisor=0.7, cap=3.0),
    head(40, range(40), 160, 107),
    head(70, range(70), 864, 592, storage=FP8),
    head(36, range(36), 288, 592, storage=MXFP4),
    head(16, [15], 224, 1600, rounding="llama"),
    *(head(t, range(t), 2880, 32000, rounding="llama", prefix="gpu: ") for t in (1, 4, 8)),
    *(head(t, range(t), 2880, 32000, rounding="llama", prefix="gpu: ") for t in (64, 200)),
    *(
        head(t, range(t), 2880, 32000, rounding="llama", storage=form, prefix="gpu: ")
        for form in (MXFP4, FP8)
        for t in (5, 64)
    ),
)
