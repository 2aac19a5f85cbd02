"""Named cases of ChooseCut: those of Choose, mixed with unrestricted rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.choose.cases import choose


def among_others(case: Case) -> Case:
    """Make some rows of a case of Choose greedy or unrestricted: the op must not read them."""

    def make(rng: np.random.Generator) -> Arrays:
        logits, temperature, top_k, top_p, seed, position, floor = case.make(rng)
        assert logits is not None and temperature is not None
        assert top_k is not None and top_p is not None
        temperature[::4] = 0.0
        top_k[1::4], top_p[1::4] = 0, 1.0
        cut = (top_k > 0) | (top_p < 1)
        if floor is not None:
            floor[1::4] = 0.0
            cut |= floor < 0
        logits[~(cut & (temperature > 0))] = np.nan
        rows = len(logits)
        chosen = rng.integers(0, 9, rows).astype(np.int32)
        logprob = rng.standard_normal(rows).astype(np.float32)
        return (logits, temperature, top_k, top_p, seed, position, floor, chosen, logprob)

    return replace(case, make=make)


CASES: tuple[Case, ...] = tuple(
    map(
        among_others,
        (
            choose("no row is cut", 0.7),
            choose("top-k", 0.8, top_k=3, rows=9),
            choose("top-p, ties", 1.0, top_p=0.6, digits=0),
            choose("min-p", [0.5, 1.0, 1.5, 0.7, 0.9], min_p=0.2, rows=5),
            choose("all three", 0.9, top_k=9, top_p=0.9, min_p=0.05, rows=7),
        ),
    )
)

KERNEL_CASES: tuple[Case, ...] = tuple(
    map(
        among_others,
        (
            choose("parts", 1.0, top_k=50, top_p=0.95, rows=6, vocab=20000),
            choose("gpu: 201088 logits", 0.8, top_k=40, top_p=0.9, rows=20, vocab=201088),
        ),
    )
)
