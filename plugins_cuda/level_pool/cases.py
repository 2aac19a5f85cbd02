"""Named cases of LevelPool."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case


def levels(name: str, *, top_k: int, depth: int, batch: int = 2, step: float = 0.0) -> Case:
    """Levels of falling log-probabilities; with ``step``, multiples of it, which have many ties.

    The last token of the last level has the log-probability −∞.
    """

    def make(rng: np.random.Generator) -> Arrays:
        fall = rng.exponential(1.0, (batch, depth, top_k))
        fall = np.sort(fall if step == 0 else step * np.floor(fall / step), axis=-1)
        fall[:, -1, 1:][..., -1:] = np.inf
        tokens = rng.integers(0, 1000, (batch, depth * top_k)).astype(np.int32)
        return tokens, -fall.reshape(batch, -1).astype(np.float32)

    return Case(name, make, {"depth": depth}, atol=0, rtol=0, kernel_atol=0, kernel_rtol=0)


CASES: tuple[Case, ...] = (
    levels("one token", top_k=1, depth=1),
    levels("one level", top_k=4, depth=1),
    levels("a chain", top_k=1, depth=7),
    levels("two levels", top_k=3, depth=2, batch=1),
    levels("a tree", top_k=4, depth=7, batch=3),
    levels("ties", top_k=3, depth=5, step=1.0),
    levels("all equal", top_k=5, depth=4, step=100.0),
    levels("more levels than tokens", top_k=2, depth=9),
)

KERNEL_CASES: tuple[Case, ...] = (
    levels("as many as there may be", top_k=16, depth=16),
    levels("gpu: batch 64", top_k=8, depth=7, batch=64),
)
