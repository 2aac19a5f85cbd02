"""Named cases of HeadScreen: those of HeadChoose, with int8 weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.head_choose.cases import choose_rows
from specbuild.plugins_cuda.head_screen.screen import screen_errors, screened

# Tiles of a large weight that are quantized; the other tiles repeat them.
_DISTINCT_TILES = 2048


def screened_rows(
    tokens: int, logit_rows: Sequence[int], columns: int, vocab: int, **how: Any
) -> Case:
    """Choose at ``logit_rows``, with the options of :func:`choose_rows`."""
    exact = choose_rows(tokens, logit_rows, columns, vocab, **how)

    def make(rng: np.random.Generator) -> Arrays:
        import torch

        x, rows, norm, weight, *sampling = exact.make(rng)
        assert weight is not None
        tiles = np.arange(len(weight))
        if len(weight) > _DISTINCT_TILES:
            # Near ties in other tiles: the bounds do not decide between them.
            tiles %= _DISTINCT_TILES
            weight = weight[tiles]
        distinct = torch.from_numpy(weight[:_DISTINCT_TILES]).bfloat16()
        codes = screened(distinct).numpy()[tiles]
        errors = screen_errors(distinct).numpy().reshape(-1, 16)[tiles].ravel()
        return (x, rows, norm, weight, codes, errors, *sampling)

    return replace(exact, make=make)


CASES: tuple[Case, ...] = (
    screened_rows(1, [0], 96, 64),
    screened_rows(7, [6, 2, 2], 192, 80, rounding="llama", temperature=1.0),
    screened_rows(5, range(5), 96, 160, temperature=[0.0, 0.5, 1.0, 0.0, 2.0]),
    screened_rows(3, range(3), 64, 256, distinct_tiles=2),
    screened_rows(
        5, range(5), 96, 160, temperature=[0.0, 0.5, 1.0, 0.0, 2.0], divisor=0.7, cap=3.0
    ),
    screened_rows(5, range(5), 96, 133, temperature=[0.0, 0.5, 1.0, 0.0, 2.0]),
)

KERNEL_CASES: tuple[Case, ...] = (
    screened_rows(20, [19, *range(11), 3], 544, 848, temperature=0.7),
    screened_rows(16, [15], 224, 1600),
    screened_rows(32, range(31, -1, -1), 160, 2224, temperature=[0.0, 1.0] * 16),
    screened_rows(9, range(9), 96, 1040, distinct_tiles=3),
    *(screened_rows(t, range(t), 2880, 201088, prefix="gpu: ") for t in (1, 8)),
    screened_rows(4, range(4), 2880, 201088, temperature=1.0, prefix="gpu: "),
    screened_rows(24, range(24), 2880, 32000, temperature=1.0, prefix="gpu: "),
)
