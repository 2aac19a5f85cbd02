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
    rows: int = 6,
    vocab: int = 37,
    digits: int | None = None,
) -> Case:
    """``rows`` rows at rising positions; ``digits`` rounds the logits, which makes ties."""

    def per_row(value: Numbers, dtype: type[np.generic]) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype), (rows,)).copy()

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
        )

    return Case(name, make)


CASES: tuple[Case, ...] = (
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
    choose(
        "every kind of row",
        [0, 1, 1, 1, 0.8, 0],
        top_k=[0, 0, 4, 0, 7, 3],
        top_p=[1, 1, 1, 0.6, 0.5, 0.5],
    ),
)
