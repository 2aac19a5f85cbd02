"""Named cases of TopLogprobs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.runtime.engine_dir.plan import ADJUSTS, FORCED_ROWS, MASKED_ROW


def top(
    name: str,
    counts: Sequence[int],
    *,
    nodes: int = 1,
    vocab: int = 61,
    digits: int | None = None,
    row_counts: Sequence[int] = (),
) -> Case:
    """A sequence of ``nodes`` rows for each of ``counts``.

    ``digits`` rounds the logits, which causes ties. One row is forced, if any are. With
    ``row_counts`` each sequence has so many rows instead, and two rows of padding follow.
    """
    held = row_counts or [nodes] * len(counts)
    slots = np.array([slot for n in held for slot in range(n)])

    def make(rng: np.random.Generator) -> Arrays:
        rows = len(slots) + 2 * bool(row_counts)
        logits, raw = (rng.standard_normal((2, rows, vocab)) * 3).astype(np.float32)
        if digits is not None:
            logits, raw = np.round(logits, digits), np.round(raw, digits)
        kinds = [0, ADJUSTS, MASKED_ROW, FORCED_ROWS | MASKED_ROW][: 4 if nodes > 1 else 3]
        changes = rng.choice(kinds, len(counts)).astype(np.int32)
        of_row = changes.repeat(held)
        last = np.where(of_row & FORCED_ROWS, 1, np.where(of_row & MASKED_ROW, 0, -1))
        raw[: len(slots)][((of_row & ADJUSTS) == 0) & (slots > last)] = np.nan
        return (
            logits,
            raw,
            rng.integers(0, vocab, rows).astype(np.int32),
            -rng.random(rows).astype(np.float32),
            changes,
            np.full(len(counts), 1, np.int32),
            np.array(counts, np.int32),
            np.cumsum([0, *held]).astype(np.int32) if row_counts else None,
        )

    return Case(name, make, {"most": 20}, kernel_atol=2e-5, kernel_rtol=1e-5)


CASES: tuple[Case, ...] = (
    top("as many as there may be", [20, 20]),
    top("several counts, none too", [0, 1, 5, 19, 20]),
    top("none", [0, 0]),
    top("ties", [3, 20, 7], digits=0),
    top("fewer tokens than requested", [20, 4], vocab=7),
    top("a vocabulary of one", [1, 0, 2], vocab=1),
    top("trees", [5, 0, 20, 0], nodes=4),
)

KERNEL_CASES: tuple[Case, ...] = (
    top("rows of a tree", [5, 0, 20, 1, 3], nodes=4, row_counts=[4, 1, 2, 0, 3]),
    top("more parts than one", [20, 0, 3], vocab=20_011),
    top("ties across parts", [20, 11], vocab=17_000, digits=0),
    top("trees, more parts than one", [4, 0], nodes=3, vocab=9_001),
    top("gpu: the vocabulary of GPT-OSS", [20, 0, 5, 1] * 4, nodes=3, vocab=201_088),
)
