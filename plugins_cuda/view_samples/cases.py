"""Named cases of ViewSamples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case


def sampled(
    name: str,
    chains: Sequence[int],
    *,
    samples: int,
    nodes: int = 3,
    padding: int = 0,
    floor: bool = True,
) -> Case:
    """Sequences that re-verify ``chains`` tokens; the last ``padding`` of them have ended."""

    def make(rng: np.random.Generator) -> Arrays:
        batch = len(chains)
        first = np.cumsum([0, *(chain + nodes for chain in chains)])
        total = int(first[-1]) + 5
        row_start = first.copy()
        row_start[batch - padding :] = first[batch - padding]
        tree = np.concatenate([first[b] + chains[b] + np.arange(nodes) for b in range(batch)])
        rows = batch * nodes
        return (
            rng.integers(1, 900, total).astype(np.int32),
            rng.integers(0, 5000, total).astype(np.int32),
            row_start.astype(np.int32),
            tree.astype(np.int32),
            np.array([chain > 0 for chain in chains], np.int32),
            rng.uniform(0.1, 2, rows).astype(np.float32),
            rng.integers(0, 50, rows).astype(np.int32),
            rng.uniform(0.1, 1, rows).astype(np.float32),
            rng.integers(0, 2**31 - 1, rows).astype(np.int32),
            rng.integers(0, 5000, rows).astype(np.int32),
            -rng.uniform(0, 3, rows).astype(np.float32) if floor else None,
        )

    attributes = {"samples": samples}
    return Case(name, make, attributes, atol=0, rtol=0, kernel_atol=0, kernel_rtol=0)


CASES: tuple[Case, ...] = (
    sampled("a few of one chain", [17], samples=5),
    sampled("all of a short chain", [3], samples=7, nodes=1),
    sampled("chains of several", [9, 0, 4, 1], samples=6),
    sampled("nothing is re-verified", [0, 0], samples=4),
    sampled("ended sequences behind", [0, 6, 0, 0], samples=4, padding=2),
    sampled("one sample", [5, 2], samples=1, nodes=2),
    sampled("no floor", [5, 2], samples=3, floor=False),
)

KERNEL_CASES: tuple[Case, ...] = (
    sampled("many sequences", [0, 3, 1, 0] * 30, samples=11, nodes=2, padding=4),
    sampled("more rows than a block", [40, 64], samples=300, nodes=40),
)
