"""Named cases of DsaCompare."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case


def compared(batch: int, nodes: int, depth: int, ring_batch: int, step: int, layers: int) -> Case:
    """Choices that differ at a third of the slots; paths of any length through the tree."""

    def make(rng: np.random.Generator) -> Arrays:
        choice = rng.integers(0, 50, batch * nodes)
        sampled = np.where(rng.random(batch * nodes) < 0.3, choice + 1, choice)
        ring = rng.integers(0, 99, (8, ring_batch, 5))
        broken = rng.integers(-9, 5, (layers, batch)).clip(0)
        path = accepted = sampled_accepted = None
        if nodes > 1:
            accepted, sampled_accepted = rng.integers(0, depth + 1, (2, batch)).astype(np.int32)
            path = np.full((batch, depth + 1), -1, np.int32)
            for b, drafts in enumerate(accepted):
                below = 1 + rng.choice(nodes - 1, drafts, replace=False)
                path[b, : drafts + 1] = [0, *sorted(below)]
        inputs = (sampled, choice, path, accepted, sampled_accepted, broken, np.array([step]), ring)
        return tuple(None if a is None else a.astype(np.int32) for a in inputs)

    tree = f"trees of {nodes} to depth {depth}" if nodes > 1 else "roots alone"
    name = f"{batch} of {ring_batch} sequences, {tree}, step {step}, {layers} layers"
    return Case(name, make, atol=0, rtol=0)


CASES: tuple[Case, ...] = (
    compared(1, 1, 0, 1, 0, 1),
    compared(3, 1, 0, 4, 9, 12),
    compared(2, 4, 3, 2, 15, 3),
    compared(130, 13, 4, 256, 27, 2),
)
