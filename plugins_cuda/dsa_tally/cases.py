"""Named cases of DsaTally."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case


def tally(layers: int, batch: int, ring_batch: int, step: int, ring_entries: int = 8) -> Case:
    """The lists of a step, most of them valid."""

    def make(rng: np.random.Generator) -> Arrays:
        broken = rng.integers(-9, 5, (layers, batch)).clip(0)
        ring = rng.integers(0, 99, (ring_entries, ring_batch))
        return (*(a.astype(np.int32) for a in (broken, np.array([step]), ring)),)

    name = f"{layers} layers, {batch} of {ring_batch} sequences, step {step}"
    return Case(name, make, atol=0, rtol=0)


CASES: tuple[Case, ...] = (tally(1, 1, 1, 0), tally(12, 3, 4, 7), tally(5, 130, 256, 27))
