"""Named cases of HeadChoose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.cases import draw, draw_packed
from specbuild.plugins_cuda.linear.packing import TILE_ROWS
from specbuild.plugins_cuda.linear.storage import BF16, FP8, Storage
from specbuild.plugins_cuda.rms_head.cases import chosen_rows


def choose_rows(
    tokens: int,
    logit_rows: Sequence[int],
    columns: int,
    vocab: int,
    *,
    temperature: float | Sequence[float] = 0.0,
    rounding: str = "gpt_oss",
    divisor: float = 1.0,
    cap: float = 0.0,
    distinct_tiles: int | None = None,
    storage: Storage = BF16,
    prefix: str = "",
) -> Case:
    """Choose at ``logit_rows``; with few ``distinct_tiles`` every logit occurs often."""
    chosen = len(logit_rows)

    def make(rng: np.random.Generator) -> Arrays:
        x, rows = chosen_rows(rng, tokens, columns, logit_rows)
        weight = draw_packed(rng, -(-vocab // TILE_ROWS) * TILE_ROWS, columns, storage)
        if distinct_tiles is not None:
            weight = weight[np.arange(len(weight)) % distinct_tiles]
        return (
            x,
            rows,
            draw(rng, columns),
            weight,
            np.broadcast_to(np.asarray(temperature, np.float32), (chosen,)).copy(),
            rng.integers(0, 2**31 - 1, chosen).astype(np.int32),
            rng.integers(0, 131072, chosen).astype(np.int32),
        )

    kind = "greedy" if temperature == 0.0 else f"temperature {temperature}"
    ties = "" if distinct_tiles is None else ", ties"
    name = (
        f"{prefix}{chosen} of {tokens} rows, {columns} to {vocab}, {rounding}, "
        f"{kind if isinstance(temperature, float) else 'temperatures'}{ties}"
    )
    name += f", {storage.name}" * storage.scaled
    name += f", over {divisor:g}" * (divisor != 1) + f", capped at {cap:g}" * (cap > 0)
    attributes = {
        "eps": 1e-5,
        "rounding": rounding,
        "divisor": divisor,
        "cap": cap,
        "vocab_size": vocab if vocab % TILE_ROWS else 0,
    }
    return Case(name, make, attributes, atol=1e-4, kernel_atol=3e-3, kernel_rtol=1e-3)


CASES: tuple[Case, ...] = (
    choose_rows(1, [0], 96, 64),
    choose_rows(7, [6, 2, 2], 192, 80, rounding="llama", temperature=1.0),
    choose_rows(5, range(5), 96, 160, temperature=[0.0, 0.5, 1.0, 0.0, 2.0]),
    choose_rows(3, range(3), 64, 256, distinct_tiles=2),
    choose_rows(5, range(5), 96, 160, temperature=[0.0, 0.5, 1.0, 0.0, 2.0], divisor=0.7),
    choose_rows(5, range(5), 96, 133, temperature=[0.0, 0.5, 1.0, 0.0, 2.0]),
    choose_rows(40, range(40), 96, 133, temperature=[0.0, 1.0] * 20),
    choose_rows(5, range(5), 96, 160, temperature=[0.0, 0.5, 1.0, 0.0, 2.0], cap=3.0),
)

KERNEL_CASES: tuple[Case, ...] = (
    choose_rows(20, [19, *range(11), 3], 544, 848, temperature=0.7),
    choose_rows(16, [15], 224, 1600),
    choose_rows(40, range(39, -1, -1), 160, 2224, temperature=[0.0, 1.0] * 20),
    # Panels: reused stages of the ring, and a last panel that is half empty; several groups of
    # rows; segments that are distributed unevenly over warps.
    choose_rows(70, range(70), 864, 1040, temperature=[0.5, 0.0] * 35),
    choose_rows(130, range(129, -1, -1), 96, 2224, rounding="llama"),
    choose_rows(33, range(33), 64, 848, distinct_tiles=2),
    choose_rows(37, range(37), 864, 848, temperature=1.0, storage=FP8),
    choose_rows(9, range(9), 96, 1040, distinct_tiles=3),
    *(choose_rows(t, range(t), 2880, 201088, prefix="gpu: ") for t in (1, 8)),
    *(
        choose_rows(t, range(t), 2880, 201088, temperature=1.0, prefix="gpu: ")
        for t in (40, 64, 128, 256)
    ),
    *(choose_rows(t, range(t), 2880, 201088, storage=FP8, prefix="gpu: ") for t in (1, 64, 128)),
)
