"""What a manifest states of products with the weights of a quantized checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class QuantizedForm:
    """How an engine stores the weights of one type of a quantized checkpoint.

    ``bits`` per code and ``block`` columns per scale, or why they are dequantized: to fp32 on a
    CPU, to bf16 on a GPU.
    """

    type: str
    weights: int
    bits: int | None = None
    block: int | None = None
    dequantized: str | None = None


@dataclass(frozen=True)
class QuantizedProducts:
    """Products of an engine with quantized weights.

    On a CPU, ``fast`` math rounds activations to int8 for each block of weights; ``exact`` splits
    them into two int8 rows. ``bf16`` is that of CUDA kernels, which decode weights to bf16.
    """

    math: Literal["fast", "exact", "bf16"]
    forms: tuple[QuantizedForm, ...]

    @property
    def kernels(self) -> tuple[tuple[int, int], ...]:
        """Bits and block of every kernel that the engine uses, each once."""
        used = {(form.bits, form.block) for form in self.forms}
        return tuple(sorted((bits, block) for bits, block in used if bits and block))
