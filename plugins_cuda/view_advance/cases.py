"""Named cases of ViewAdvance."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case


def advance(
    name: str, kinds: str, *, nodes: int = 4, depth: int = 3, buffer: int = 8, tree: bool = True
) -> Case:
    """One sequence per letter: F full, f full with no selected blocks, P partial, D done."""

    def make(rng: np.random.Generator) -> Arrays:
        batch = len(kinds)
        start = rng.integers(20, 90, batch)
        emitted = rng.integers(1, depth + 2, batch) if tree else np.ones(batch, np.int64)
        path = np.full((batch, depth + 1), -1, np.int32)
        for row, count in zip(path, emitted, strict=True):
            row[0] = 0
            row[1:count] = np.sort(1 + rng.permutation(nodes - 1)[: count - 1])
        positions = np.repeat(start, nodes) + rng.integers(0, 3, batch * nodes)
        positions[::nodes] = start
        return (
            rng.integers(1, 900, batch * nodes).astype(np.int32),
            positions.astype(np.int32),
            path if tree else None,
            (start + emitted).astype(np.int32),
            np.array([k == "D" for k in kinds], np.int32),
            np.array([k in "Ff" for k in kinds], np.int32),
            np.array([int(rng.integers(9)) if k == "F" else -1 for k in kinds], np.int32),
            rng.integers(1, 20, batch).astype(np.int32),
            rng.integers(-1, 9, batch).astype(np.int32),
            rng.integers(0, 9, batch).astype(np.int32),
            rng.integers(1, 900, (batch, buffer)).astype(np.int32),
        )

    return Case(name, make, atol=0, rtol=0, kernel_atol=0, kernel_rtol=0)


CASES: tuple[Case, ...] = (
    advance("full, partial, done", "FPDf"),
    advance("one partial step", "P"),
    advance("chains", "PFPF", nodes=4),
    advance("roots alone", "PFD", nodes=1, tree=False),
    advance("more sequences than a block", "FPDf" * 40, nodes=5, depth=4),
)
