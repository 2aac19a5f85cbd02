"""Named cases of DraftInput."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.embed.cases import chosen_table
from specbuild.plugins_cuda.linear.cases import draw


def inputs(tokens: int, width: int, *, embedding: bool = True, prefix: str = "") -> Case:
    """``tokens`` rows of states ``width`` wide."""

    def make(rng: np.random.Generator) -> Arrays:
        ids, table = chosen_table(rng, tokens, 60, width)
        return (
            ids,
            table if embedding else None,
            draw(rng, width) if embedding else None,
            draw(rng, tokens, width, scale=5.0),
            draw(rng, width),
        )

    kind = "embedding and hidden" if embedding else "hidden"
    return Case(f"{prefix}{tokens} rows of {width}, {kind}", make, {"eps": 1e-5})


CASES: tuple[Case, ...] = (
    inputs(1, 32),
    inputs(7, 192),
    inputs(5, 96, embedding=False),
)

KERNEL_CASES: tuple[Case, ...] = (
    inputs(3, 2880),
    inputs(2, 8640, embedding=False),
    *(inputs(t, 2880, prefix="gpu: ") for t in (1, 8, 64, 2048)),
)
