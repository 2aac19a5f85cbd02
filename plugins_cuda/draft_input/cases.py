"""Named cases of DraftInput."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.embed.cases import chosen_table
from specbuild.plugins_cuda.linear.cases import draw


def inputs(
    tokens: int,
    width: int,
    *,
    embedding: bool = True,
    segments: int = 1,
    packed: bool = False,
    rounding: str = "llama",
    residual: bool = False,
    factor: bool = False,
    prefix: str = "",
) -> Case:
    """``tokens`` rows of states with ``segments`` parts of ``width`` values."""

    def make(rng: np.random.Generator) -> Arrays:
        ids, table = chosen_table(rng, tokens, 64, width, packed=packed)
        return (
            ids,
            table if embedding else None,
            draw(rng, width) if embedding else None,
            draw(rng, tokens, segments * width, scale=5.0)
            * np.repeat(np.arange(1, segments + 1, dtype=np.float32), width),
            draw(rng, segments * width),
            draw(rng, tokens, segments * width, scale=2.0) if residual else None,
            draw(rng, 1) if factor else None,
        )

    kind = "embedding and hidden" if embedding else "hidden"
    kind += ", packed" * packed + f", {segments} segments" * (segments > 1)
    kind += f", {rounding} norm" * (rounding != "llama")
    kind += ", residual" * residual + ", factor" * factor
    name = f"{prefix}{tokens} rows of {width}, {kind}"
    return Case(name, make, {"eps": 1e-5, "segments": segments, "rounding": rounding})


CASES: tuple[Case, ...] = (
    inputs(1, 32),
    inputs(7, 192),
    inputs(5, 96, embedding=False),
    inputs(3, 64, embedding=False, segments=3),
    inputs(6, 288, packed=True),
    inputs(4, 96, rounding="offset"),
    inputs(4, 96, embedding=False, rounding="gpt_oss"),
    inputs(5, 96, embedding=False, rounding="gpt_oss", residual=True),
    inputs(3, 288, embedding=False, rounding="offset", residual=True, factor=True),
    # More rows than a step has: a warp per row.
    inputs(258, 296),
    inputs(257, 64, embedding=False, segments=2, rounding="offset"),
    inputs(259, 32, embedding=False, rounding="gpt_oss", residual=True, factor=True),
)

KERNEL_CASES: tuple[Case, ...] = (
    inputs(3, 2880),
    inputs(2, 8640, embedding=False),
    inputs(2, 4096, embedding=False, segments=3),
    inputs(3, 5376, embedding=False, rounding="offset", residual=True, factor=True),
    *(inputs(t, 2880, prefix="gpu: ") for t in (1, 8, 64, 2048)),
)
