"""Named cases of RankSum; a single rank is its own peer."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.cases import draw
from specbuild.plugins_cuda.rank_sum.rounds import ROUND_ROWS, exchange_rounds

LIMIT_MS = 20_000


def exchange_arrays(
    rng: np.random.Generator, rows: int, width: int, ranks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return an inbox with words of earlier rounds, a state, and an empty fault record."""
    epoch = int(rng.integers(0, 2**31 - exchange_rounds(rows)))
    words = min(rows, ROUND_ROWS) * width
    inbox = rng.integers(-(2**31), 2**31, (2, ranks - 1, words, 2)).astype(np.int32)
    inbox[..., 1] = rng.integers(max(0, epoch - 40), epoch + 1, inbox.shape[:-1])
    state = np.array([np.uint32(epoch), LIMIT_MS], np.uint32).view(np.int32)
    return inbox, state, np.zeros(8, np.int32)


def rank_sum(
    rows: int,
    width: int,
    *,
    ranks: int = 2,
    bias: bool = False,
    residual: bool = False,
    prefix: str = "",
) -> Case:
    """``rows`` rows, ``width`` wide."""

    def make(rng: np.random.Generator) -> Arrays:
        return (
            draw(rng, rows, width),
            draw(rng, width) if bias else None,
            draw(rng, rows, width) if residual else None,
            *exchange_arrays(rng, rows, width, ranks),
        )

    name = f"{prefix}{rows} rows of {width}, {ranks} ranks" + ", bias" * bias
    return Case(
        name + ", residual" * residual, make, {"ranks": ranks, "exchange": 3},
        atol=0, rtol=0, kernel_atol=0, kernel_rtol=0,
    )  # fmt: skip


CASES: tuple[Case, ...] = (
    rank_sum(1, 64, residual=True),
    rank_sum(3, 96, bias=True, residual=True),
    rank_sum(2, 48, ranks=4, bias=True),
    rank_sum(5, 32, ranks=8, residual=True),
)

KERNEL_CASES: tuple[Case, ...] = (
    rank_sum(1, 2880, bias=True, residual=True),
    rank_sum(7, 2880),
    rank_sum(300, 34, bias=True, residual=True),
    rank_sum(515, 16, ranks=4, residual=True),
    rank_sum(64, 2880, bias=True, residual=True, prefix="gpu: "),
    rank_sum(256, 2880, residual=True, prefix="gpu: "),
    rank_sum(700, 2880, ranks=8, residual=True, prefix="gpu: "),
)
