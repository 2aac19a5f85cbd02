"""Named cases of AbsorbQuery."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.cases import draw, draw_packed

_POSITIONS = 50


@dataclass(frozen=True)
class Sizes:
    """Heads, values of a head without and with RoPE, the latent, and the padding of an entry."""

    heads: int = 3
    nope: int = 32
    rope: int = 16
    rank: int = 32
    padded: int = 0

    @property
    def entry(self) -> int:
        """Values of a cache entry."""
        return self.rank + self.rope + self.padded

    @property
    def name(self) -> str:
        """The sizes in names of cases."""
        return f"{self.heads} heads of {self.nope} and {self.rope}, entries of {self.entry}"


YOUTU, GLM, V3 = Sizes(16, 128, 64, 512), Sizes(20, 192, 64, 512), Sizes(128, 128, 64, 512)


def absorb(tokens: int, sizes: Sizes, *, padding: int = 0, prefix: str = "") -> Case:
    """``tokens`` rows; the last ``padding`` of them are never read."""

    def make(rng: np.random.Generator) -> Arrays:
        q = draw(rng, tokens, sizes.heads * (sizes.nope + sizes.rope))
        q[tokens - padding :] = np.nan
        angles = rng.uniform(0, 6.3, (_POSITIONS, sizes.rope // 2)).astype(np.float32)
        return (
            q,
            draw_packed(rng, sizes.heads * sizes.rank, sizes.nope),
            np.cos(angles) * np.float32(1.34),
            np.sin(angles) * np.float32(1.34),
            rng.integers(0, _POSITIONS, tokens).astype(np.int32),
        )

    return Case(
        f"{prefix}{tokens} rows, {padding} padding, {sizes.name}",
        make,
        {"q_heads": sizes.heads, "entry": sizes.entry},
        compare={"absorbed": np.s_[: tokens - padding]},
        # A product that is rounded differently counts twice if RoPE subtracts.
        kernel_atol=3e-2,
    )


CASES: tuple[Case, ...] = (
    absorb(1, Sizes()),
    absorb(5, Sizes(2, 64, 8, 96, padded=8), padding=2),
    absorb(19, Sizes(1, 96, 16, 64)),
)

KERNEL_CASES: tuple[Case, ...] = (
    absorb(70, Sizes(2, 192, 64, 96), padding=3),
    absorb(130, Sizes(2, 32, 8, 32, padded=24)),
    *(absorb(t, GLM, prefix="gpu: ") for t in (1, 8, 40)),
    *(absorb(t, V3, prefix="gpu: ") for t in (1, 16, 256)),
    absorb(200, YOUTU, padding=8, prefix="gpu: "),
)
