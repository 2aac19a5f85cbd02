"""Named cases of RankAdvance."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case


def rank_advance(epoch: int, rounds: int) -> Case:
    """``rounds`` rounds after ``epoch``, which is unsigned."""

    def make(_rng: np.random.Generator) -> Arrays:
        return (np.array([epoch, 20_000], np.uint32).view(np.int32),)

    name = f"{rounds} rounds after {epoch}"
    return Case(name, make, {"rounds": rounds}, atol=0, rtol=0, kernel_atol=0, kernel_rtol=0)


CASES: tuple[Case, ...] = (
    rank_advance(0, 72),
    rank_advance(2**31 - 30, 73),
    rank_advance(2**32 - 30, 73),
)
