"""What a manifest states of products with quantized weights (CPU engines)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class QuantizedForm:
    """How a CPU engine stores the weights of one type of a quantized checkpoint.

    ``bits`` per code and ``block`` columns per scale, or why they are dequantized to fp32.
    """

    type: str
    weights: int
    bits: int | None = None
    block: int | None = None
    dequantized: str | None = None


@dataclass(frozen=True)
class QuantizedProducts:
    """Products of a CPU engine with quantized weights.

    ``fast`` math rounds activations to int8 for each block of weights; ``exact`` splits them into
    two int8 rows.
    """

    math: Literal["fast", "exact"]
    forms: tuple[QuantizedForm, ...]

    @property
    def kernels(self) -> tuple[tuple[int, int], ...]:
        """Bits and block of every kernel that the engine uses, each once."""
        used = {(form.bits, form.block) for form in self.forms}
        return tuple(sorted((bits, block) for bits, block in used if bits and block))
