"""Named cases of ViewTally."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case


def tally(rows: int, samples: int, batch: int, *, ring_batch: int, step: int) -> Case:
    """Samples of re-verified tokens, most of which are sampled again; some strata are empty."""

    def make(rng: np.random.Generator) -> Arrays:
        fed_again = rng.random(batch) < 0.6
        own = np.append(np.flatnonzero(fed_again), -1)
        choice = rng.integers(1, 900, rows + samples)
        token = np.where(rng.random(samples) < 0.7, choice[rows:], 901)
        rings = rng.integers(0, 99, (2, 8, ring_batch))
        arrays = (choice, rng.choice(own, samples), token, fed_again, np.array([step]), *rings)
        return tuple(array.astype(np.int32) for array in arrays)

    name = f"{samples} samples, {batch} of {ring_batch} sequences, step {step}"
    return Case(name, make, atol=0, rtol=0, kernel_atol=0, kernel_rtol=0)


CASES: tuple[Case, ...] = (
    tally(4, 4, 1, ring_batch=1, step=0),
    tally(12, 8, 3, ring_batch=4, step=13),
    tally(260, 11, 130, ring_batch=256, step=27),
)
