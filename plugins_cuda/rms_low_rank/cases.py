"""Named cases of RmsLowRank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.cases import draw, draw_packed
from specbuild.plugins_cuda.linear.storage import BF16, FP8, MXFP4, Storage

_POSITIONS = 50


@dataclass(frozen=True)
class Sizes:
    """The widths of a row's parts; ``padded`` is the padding of an entry."""

    query: int = 64
    rank: int = 32
    rope: int = 16
    padded: int = 0
    query_norm: bool = True

    @property
    def name(self) -> str:
        """The sizes in names of cases."""
        padded = f" + {self.padded}" * (self.padded > 0)
        plain = " as they are" * (not self.query_norm)
        return f"{self.query}{plain}, {self.rank} and {self.rope}{padded}"


TINY = Sizes()
YOUTU, GLM, V2_LITE, V3 = (
    Sizes(1536, 512, 64),
    Sizes(768, 512, 64),
    Sizes(3072, 512, 64, query_norm=False),
    Sizes(1536, 512, 64),
)


def project(
    tokens: int,
    columns: int,
    sizes: Sizes = TINY,
    *,
    norm: bool = True,
    rounding: str = "llama",
    page_size: int = 16,
    padding: int = 0,
    storage: Storage = BF16,
    prefix: str = "",
) -> Case:
    """``tokens`` rows; the last ``padding`` of them write to page 0."""
    live = tokens - padding
    pages = 2 + -(-live // page_size)

    def make(rng: np.random.Generator) -> Arrays:
        slots = page_size + rng.permutation((pages - 1) * page_size)[:live]
        slots = np.concatenate([slots, rng.integers(0, page_size, padding)])
        angles = rng.uniform(0, 6.3, (_POSITIONS, sizes.rope // 2)).astype(np.float32)
        positions = rng.integers(0, _POSITIONS, tokens)
        rows = sizes.query + sizes.rank + sizes.rope
        return (
            draw(rng, tokens, columns, scale=3.0 if norm else 1.0),
            draw(rng, columns) if norm else None,
            draw_packed(rng, rows, columns, storage),
            draw(rng, sizes.query) if sizes.query_norm else None,
            draw(rng, sizes.rank),
            np.cos(angles) * np.float32(1.34),
            np.sin(angles) * np.float32(1.34),
            positions.astype(np.int32),
            slots.astype(np.int32),
            draw(rng, pages, 1, page_size, sizes.rank + sizes.rope + sizes.padded),
        )

    extras = f", {rounding} norm" * norm + f", {padding} padding" * (padding > 0)
    stored = f", {storage.name}" * storage.scaled
    return Case(
        f"{prefix}{tokens} rows of {columns}: {sizes.name}, pages of {page_size}{extras}{stored}",
        make,
        {"eps": 1e-5, "rounding": rounding, "latent_eps": 1e-6},
        atol=1e-4,
        compare={"c_pool_out": np.s_[1:]},
        # A product that is rounded differently is scaled by the norm, and counts twice if RoPE
        # subtracts.
        kernel_atol=5e-2,
    )


CASES: tuple[Case, ...] = (
    project(1, 192),
    project(5, 96, Sizes(56, 16, 8, padded=8), rounding="gpt_oss", padding=2),
    project(8, 160, Sizes(96, 48, 16, query_norm=False), norm=False),
)

KERNEL_CASES: tuple[Case, ...] = (
    project(11, 544, padding=3),
    project(37, 96, Sizes(320, 272, 32), norm=False, padding=4),
    project(35, 1280, Sizes(64, 32, 16, padded=16), padding=2),
    project(3, 256, storage=FP8),
    project(9, 256, storage=MXFP4),
    *(project(t, 2048, GLM, page_size=64, prefix="gpu: ") for t in (1, 4, 64)),
    project(8, 2048, V2_LITE, page_size=64, prefix="gpu: "),
    *(project(t, 7168, V3, page_size=64, prefix="gpu: ") for t in (1, 16)),
    project(200, 2048, YOUTU, page_size=64, padding=8, prefix="gpu: "),
)
