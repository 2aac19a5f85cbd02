"""Named cases of RankHeadScreen; a single rank is its own peer, so its rows are greedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.head_screen.cases import screened_rows
from specbuild.plugins_cuda.rank_head_screen.lowering import ROW_WORDS
from specbuild.plugins_cuda.rank_sum.cases import exchange_arrays


def rank_rows(
    tokens: int, logit_rows: Sequence[int], columns: int, vocab: int, *, ranks: int = 2, **how: Any
) -> Case:
    """Choose at ``logit_rows``; each rank has ``vocab`` tokens."""
    alone = screened_rows(tokens, logit_rows, columns, vocab, **how)

    def make(rng: np.random.Generator) -> Arrays:
        return (*alone.make(rng), *exchange_arrays(rng, len(logit_rows), ROW_WORDS, ranks))

    attributes = {**alone.attributes, "ranks": ranks, "exchange": 2}
    return replace(alone, name=f"{alone.name}, {ranks} ranks", make=make, attributes=attributes)


CASES: tuple[Case, ...] = (
    rank_rows(1, [0], 96, 64),
    rank_rows(7, [6, 2, 2], 192, 80, rounding="llama", ranks=4),
    rank_rows(3, range(3), 64, 256, distinct_tiles=2),
)

KERNEL_CASES: tuple[Case, ...] = (
    rank_rows(20, [19, *range(11), 3], 544, 848),
    rank_rows(32, range(31, -1, -1), 160, 2224),
    *(rank_rows(t, range(t), 2880, 100544, prefix="gpu: ") for t in (1, 8, 32)),
)
