"""Named cases of RmsQueryLatent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.cases import draw, draw_packed

_POSITIONS = 50


@dataclass(frozen=True)
class _Sizes:
    heads: int = 6
    width: int = 32
    latent: int = 48


_TINY = _Sizes()
_GPT_OSS = _Sizes(heads=64, width=64, latent=512)


def project(
    tokens: int,
    columns: int,
    sizes: _Sizes = _TINY,
    *,
    norm: bool = True,
    bias: bool = True,
    page_size: int = 16,
    padding: int = 0,
    prefix: str = "",
) -> Case:
    """``tokens`` rows; the last ``padding`` of them write to page 0."""
    live = tokens - padding
    pages = 2 + -(-live // page_size)

    def make(rng: np.random.Generator) -> Arrays:
        rows = sizes.heads * sizes.width
        slots = page_size + rng.permutation((pages - 1) * page_size)[:live]
        slots = np.concatenate([slots, rng.integers(0, page_size, padding)])
        angles = rng.uniform(0, 6.3, (_POSITIONS, sizes.width // 2)).astype(np.float32)
        positions = rng.integers(0, _POSITIONS, tokens)
        biases = np.concatenate([draw(rng, rows), np.zeros(sizes.latent, np.float32)])
        return (
            draw(rng, tokens, columns, scale=3.0 if norm else 1.0),
            draw(rng, columns) if norm else None,
            draw_packed(rng, rows + sizes.latent, columns),
            biases if bias else None,
            np.cos(angles) * np.float32(1.34),
            np.sin(angles) * np.float32(1.34),
            positions.astype(np.int32),
            slots.astype(np.int32),
            draw(rng, pages, 1, page_size, sizes.latent),
        )

    extras = ", norm" * norm + ", bias" * bias + f", {padding} padding" * (padding > 0)
    name = (
        f"{prefix}{tokens} rows of {columns}, {sizes.heads} heads of {sizes.width}, latent of "
        f"{sizes.latent}, pages of {page_size}{extras}"
    )
    return Case(
        name,
        make,
        {"q_heads": sizes.heads, "eps": 1e-5},
        atol=1e-4,
        compare={"c_pool_out": np.s_[1:]},
        # A product that is rounded differently counts twice if RoPE subtracts.
        kernel_atol=3e-2,
    )


CASES: tuple[Case, ...] = (
    project(1, 192),
    project(5, 96, padding=2),
    project(8, 160, _Sizes(heads=2, width=16, latent=16), norm=False, bias=False),
)

KERNEL_CASES: tuple[Case, ...] = (
    project(11, 544, padding=3),
    project(37, 96, _Sizes(heads=3, width=48, latent=32), norm=False, bias=False, padding=4),
    project(35, 1280, padding=2),
    *(project(t, 2880, _GPT_OSS, page_size=64, prefix="gpu: ") for t in (1, 4, 8, 64)),
    project(200, 2880, _GPT_OSS, page_size=64, padding=8, prefix="gpu: "),
)
