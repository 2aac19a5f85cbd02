"""Rules that fill the tensors of synthetic models, one per kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from specbuild.builder.checkpoint.mxfp4 import BLOCK_VALUES, SCALE_BIAS
from specbuild.builder.synth.noise import Noise
from specbuild.builder.synth.tensor import SynthTensor
from specbuild.plugins_cuda.moe.e2m1 import E2M1

CONTRIBUTION = 0.04
NORM_STD = 0.05
BIAS_STD = 0.02
# Codes of a scale: a power of two and its neighbours, equally often.
_SCALE_STEPS = (-1, 0, 1)


@dataclass(frozen=True)
class Fill:
    """Returns one tensor of a layer: from its name and shape to its parts.

    ``contribution`` is the rms of a sublayer's addition, relative to the stream's 1.
    """

    noise: Noise
    contribution: float = CONTRIBUTION

    def normal(self, name: str, shape: tuple[int, ...], std: float) -> SynthTensor:
        """Return normal values around 0."""
        made = self._rows("BF16", shape, lambda rows, w: self.noise.weight(name, rows, w, std))
        return replace(made, std=std)

    def norm(
        self, name: str, shape: tuple[int, ...], mean: float = 1.0, less: float = 0.0
    ) -> SynthTensor:
        """Return normal values around ``mean``, stored minus ``less``."""

        def make(rows: torch.Tensor, width: int) -> torch.Tensor:
            noise = self.noise.normal(name, rows, width, NORM_STD)
            return (mean * (1 + noise) - less).bfloat16()

        return self._rows("BF16", shape, make)

    def router(self, name: str, shape: tuple[int, ...]) -> SynthTensor:
        """Return unit logits that are independent of the constant, which would always favour some
        experts.
        """

        def make(rows: torch.Tensor, width: int) -> torch.Tensor:
            weight = self.noise.weight(name, rows, width, 1 / math.sqrt(width))
            weight[:, 0] = 0
            return weight

        return self._rows("BF16", shape, make)

    def blocks(self, name: str, shape: tuple[int, ...]) -> SynthTensor:
        """Return uniform codes, two per byte."""
        return self._rows("U8", shape, lambda rows, w: self.noise.bytes(name, rows, w), 2)

    def scales(self, name: str, shape: tuple[int, ...], output_rms: float) -> SynthTensor:
        """Return scales for an output of about ``output_rms`` from an input of rms 1."""
        spread = math.sqrt(sum(4.0**step for step in _SCALE_STEPS) / len(_SCALE_STEPS))
        values = math.sqrt(sum(value**2 for value in E2M1) / len(E2M1))
        exponent = round(
            math.log2(output_rms / (values * spread * math.sqrt(shape[-1] * BLOCK_VALUES)))
        )
        among = [SCALE_BIAS + exponent + step for step in _SCALE_STEPS]
        return self._rows("U8", shape, lambda rows, w: self.noise.choices(name, rows, w, among))

    @staticmethod
    def _rows(
        dtype: str,
        shape: tuple[int, ...],
        make: Callable[[torch.Tensor, int], torch.Tensor],
        row_axes: int = 1,
    ) -> SynthTensor:
        """Return rows of the last ``row_axes`` axes; a vector is one row."""
        if len(shape) == 1:
            one = torch.zeros(1, dtype=torch.int64)
            return SynthTensor(dtype, shape, lambda first, end: make(one, shape[0])[0, first:end])
        width = math.prod(shape[-row_axes:])
        per_entry = math.prod(shape[1:]) // width

        def part(first: int, end: int) -> torch.Tensor:
            rows = torch.arange(first * per_entry, end * per_entry)
            return make(rows, width).view(end - first, *shape[1:])

        return SynthTensor(dtype, shape, part)
