"""Named cases of Choose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case

Numbers = float | Sequence[float]


def choose(
    name: str,
    temperature: Numbers,
    *,
    top_k: Numbers = 0,
    top_p: Numbers = 1.0,
    seed: Numbers = 11,
    min_p: Numbers | None = None,
    rows: int = 6,
    vocab: int = 37,
    digits: int | None = None,
) -> Case:
    """``rows`` rows at rising positions; ``digits`` rounds the logits, which causes ties.

    ``min_p`` None omits the floor.
    """

    def per_row(value: Numbers, dtype: type[np.generic]) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype), (rows,)).copy()

    def floors() -> np.ndarray:
        share = per_row(min_p or 0.0, np.float32)
        with np.errstate(divide="ignore"):
            floor = per_row(temperature, np.float32) * np.log(share)
        return np.where(share > 0, np.minimum(floor, -2e-38), 0).astype(np.float32)

    def make(rng: np.random.Generator) -> Arrays:
        logits = (rng.standard_normal((rows, vocab)) * 2).astype(np.float32)
        if digits is not None:
            logits = np.round(logits, digits)
        return (
            logits,
            per_row(temperature, np.float32),
            per_row(top_k, np.int32),
            per_row(top_p, np.float32),
            per_row(seed, np.int32),
            np.arange(100, 100 + rows, dtype=np.int32),
            None if min_p is None else floors(),
        )

    return Case(name, make, kernel_atol=1e-5, kernel_rtol=1e-5)


def extreme_draws() -> Case:
    """Rows whose second token is chosen only if the noise at the end of its range is exact.

    Token 2 of the first row has the largest noise, 16.6355, and token 0 has 0.6009. Token 1 of the
    second row has the smallest noise, -2.8115, and token 0 has 0.8710.
    """

    def make(rng: np.random.Generator) -> Arrays:
        logits = rng.uniform(-60, -50, (2, 37)).astype(np.float32)
        logits[0, [2, 0]] = 0, 16.3 - 0.6009
        logits[1, [1, 0]] = 0, -2.83 - 0.8710
        return (
            logits,
            np.ones(2, np.float32),
            np.zeros(2, np.int32),
            np.ones(2, np.float32),
            np.array([24, 44], np.int32),
            np.array([189952, 9651], np.int32),
            None,
        )

    return Case("the ends of the noise", make, kernel_atol=1e-5, kernel_rtol=1e-5)


CASES: tuple[Case, ...] = (
    extreme_draws(),
    choose("greedy", 0.0),
    choose("greedy, ties", 0.0, digits=0),
    choose("greedy, one row", 0.0, rows=1),
    choose("greedy with cuts that do nothing", 0.0, top_k=3, top_p=0.5),
    choose("sampled", 1.0),
    choose("sampled, large vocabulary", 1.0, vocab=4096, rows=3),
    choose("sampled, vocabulary of one", 1.0, vocab=1),
    choose("temperatures", [0.25, 0.5, 1.0, 1.5, 2.0, 4.0]),
    choose("seeds", 1.0, seed=[0, 1, 2, 3, 2**31 - 1, 2**16]),
    choose("greedy and sampled rows", [0, 1, 0, 0.7, 1, 0]),
    choose("top-k", 1.0, top_k=[1, 2, 3, 5, 36, 37]),
    choose("top-k beyond the vocabulary", 1.0, top_k=100),
    choose("top-k, ties", 1.0, top_k=4, digits=0),
    choose("top-p", 1.0, top_p=[0.01, 0.3, 0.5, 0.7, 0.9, 0.99]),
    choose("top-k, then top-p", [1, 2, 1, 0.5, 1, 1], top_k=5, top_p=[0.2, 0.4, 0.6, 0.8, 0.9, 1]),
    choose("min-p", 1.0, min_p=[0, 0.01, 0.1, 0.3, 0.9, 1]),
    choose(
        "min-p of one logit of two", [1, 2, 0.5, 0, 1, 1], digits=0, min_p=[1, 0.5, 0.1, 1, 0, 1]
    ),
    choose(
        "min-p, then top-k, then top-p",
        [1, 2, 1, 0.5, 1, 1],
        min_p=[0.05, 0.1, 0.2, 0.05, 0.1, 0],
        top_k=[0, 4, 36, 5, 2, 3],
        top_p=[0.6, 1, 0.5, 0.4, 0.9, 0.9],
    ),
    choose(
        "every kind of row",
        [0, 1, 1, 1, 0.8, 0],
        top_k=[0, 0, 4, 0, 7, 3],
        top_p=[1, 1, 1, 0.6, 0.5, 0.5],
    ),
)

KERNEL_CASES: tuple[Case, ...] = (
    choose("a vocabulary that is no multiple of vectors", 1.0, vocab=4099, top_k=[0, 3, 9, 0, 5,
    40],
           top_p=[1, 1, 1, 0.4, 0.7, 0.9]),
    choose("hot: one bucket holds more than the list", 1e3, rows=4, vocab=9000,
           top_k=[0, 3000, 2500, 8999], top_p=[0.5, 1, 0.3, 1]),
    choose("cold: top-k reaches far", 0.05, rows=3, vocab=5000, top_k=[2000, 4500, 4999],
           top_p=[1, 0.9, 1]),
    choose("ties across the cut", [1, 1, 100, 100], rows=4, vocab=5000, digits=0,
           top_k=[777, 0, 2222, 4100], top_p=[1, 0.6, 0.7, 1]),
    choose("ties beyond the list", 10.0, rows=3, vocab=20_000, digits=-1, top_k=[7001, 0, 15_000],
           top_p=[1, 0.31, 0.47]),
    choose("temperatures at both ends", [1e-6, 1e6, 1e-6, 1e6], rows=4, vocab=3000,
           top_k=[0, 100, 50, 0], top_p=[0.5, 1, 1, 0.9]),
    choose("noise among many", 3.0, rows=8, vocab=2000, top_k=[1999, 1000, 500, 250, 0, 0, 0, 0],
           top_p=[1, 1, 1, 1, 0.9, 0.95, 0.99, 0.999]),
    choose("small heads of a list", 1e3, rows=24, vocab=1000, top_k=[*range(1, 13), *[0] * 12],
           top_p=[*[1] * 12, *((n + 0.5) / 1000 for n in range(12))]),
    choose("small heads beyond the list", 1e3, rows=12, vocab=7000, top_k=[2, 3, 4, 5, 6, 7] * 2,
           top_p=[*[1] * 6, *[0.6] * 6]),
    choose("small heads of ties", 1.0, rows=24, vocab=800, digits=-1,
           top_k=[*range(1, 13), *[6] * 12], top_p=[*[1] * 12, *(n / 12 for n in range(12))]),
    choose("small heads of ties beyond the list", 1.0, rows=8, vocab=7000, digits=-1,
           top_k=[*range(1, 5), *[6] * 4], top_p=[*[1] * 4, 0.1, 0.3, 0.55, 0.9]),
    choose("min-p takes what top-k asks for", 1.0, rows=6, vocab=5000, top_k=[4000, 50, 0, 3, 0, 0],
           top_p=[1, 0.9, 0.8, 1, 1, 0.3], min_p=[0.1, 0.02, 0.05, 0.5, 0.01, 1]),
    choose("min-p in a bucket of many", 1e3, rows=4, vocab=9000, top_k=[0, 3000, 2500, 0],
           top_p=[0.5, 1, 0.3, 1], min_p=[0.999, 0.998, 0.9995, 0.9999]),
    choose("gpu: min-p of the vocabulary of GPT-OSS", 1.0, rows=4, vocab=201_088,
           top_k=[0, 50, 0, 0], top_p=[1, 1, 0.9, 1], min_p=[0.02, 0.01, 0.05, 0.3]),
    choose("gpu: the vocabulary of GPT-OSS", [0, 1, 1, 1, 0.7, 1, 1.5, 0.2], rows=8,
           vocab=201_088, top_k=[0, 0, 50, 0, 1000, 100_000, 0, 0],
           top_p=[1, 1, 1, 0.9, 0.95, 1, 0.99, 0.5]),
    choose("gpu: more rows than multiprocessors", 1.0, rows=160, vocab=32_000, top_k=50, top_p=0.9),
)  # fmt: skip
