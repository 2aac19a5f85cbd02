"""Named cases of HeadKeep: those of HeadChoose, with rows of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.head_choose.cases import choose_rows


def keep_rows(tokens: int, logit_rows: Sequence[int], columns: int, vocab: int, **how: Any) -> Case:
    """Choose at ``logit_rows``: greedy, from all tokens, and restricted by each of three rules."""
    exact = choose_rows(tokens, logit_rows, columns, vocab, **how)
    chosen = len(logit_rows)

    def make(rng: np.random.Generator) -> Arrays:
        *given, _, seed, position = exact.make(rng)
        kinds = np.arange(chosen) % 6
        return (
            *given,
            np.where(kinds == 0, 0.0, 0.8).astype(np.float32),
            seed,
            position,
            np.where(np.isin(kinds, (0, 2)), 9, 0).astype(np.int32),
            np.where(np.isin(kinds, (0, 3)), 0.6, 1.0).astype(np.float32),
            np.where(np.isin(kinds, (0, 4)), -2.0, 0.0).astype(np.float32),
            rng.standard_normal((chosen, vocab)).astype(np.float32),
        )

    return replace(exact, name=exact.name.replace("greedy", "rows of every kind"), make=make)


CASES: tuple[Case, ...] = (keep_rows(7, [6, 2, 0, 4, 1, 5, 3], 96, 160),)

KERNEL_CASES: tuple[Case, ...] = (
    keep_rows(19, range(18, -1, -1), 96, 848),
    keep_rows(70, range(70), 96, 1040),
    keep_rows(7, [6, 2, 0, 4, 1, 5, 3], 96, 160, divisor=0.7, cap=3.0),
    keep_rows(7, [6, 2, 0, 4, 1, 5, 3], 96, 133),
    keep_rows(70, range(70), 96, 133),
    *(keep_rows(t, range(t), 2880, 201088, prefix="gpu: ") for t in (6, 70)),
)
