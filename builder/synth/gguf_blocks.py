"""Rows of GGUF's blocks: of random codes, and of given numbers, each row independently.

Blocks are Q8_0 (32 numbers), Q4_K and Q6_K (256). Random codes are uniform; scales are realistic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specbuild.builder.synth.noise import Noise

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
# The deviation of scales from their mean.
_SCALE_STD = 0.2
_SIX_BITS = 63


@dataclass(frozen=True)
class RowBlocks:
    """Blocks of one type: GGUF's number, elements, bytes, and offsets of their float16s.

    ``unit`` is the deviation of numbers of random bytes if the first float16 is 1. ``minimum`` is
    the second float16 in units of the first, 0 for none. ``pack`` stores numbers float32 [n,
    elements] as bytes u8 [n, nbytes].
    """

    number: int
    elements: int
    nbytes: int
    scale_at: int
    unit: float
    pack: Callable[[Floats], Bytes]
    minimum: float = 0.0

    def random(
        self, noise: Noise, name: str, rows: torch.Tensor, width: int, std: float
    ) -> torch.Tensor:
        """Return rows [n] of ``width`` numbers with this deviation, u8 [n, bytes of a row]."""
        count = width // self.elements
        raw = noise.bytes(name, rows, count * self.nbytes).numpy()
        blocks = raw.reshape(len(rows), count, self.nbytes)
        factors = 1 + noise.normal(f"{name}.scales", rows, count, _SCALE_STD).numpy()
        scales = np.abs(factors) * (std / self.unit)
        _put_halves(blocks, self.scale_at, scales)
        if self.minimum:
            _put_halves(blocks, self.scale_at + 2, scales * self.minimum)
        return torch.from_numpy(raw)

    def packed(self, values: torch.Tensor) -> torch.Tensor:
        """Return rows of numbers [n, width] as bytes u8 [n, bytes of a row]."""
        blocks = values.float().numpy().reshape(-1, self.elements)
        return torch.from_numpy(self.pack(blocks).reshape(len(values), -1))


def _put_halves(blocks: Bytes, place: int, values: Floats) -> None:
    halves = np.ascontiguousarray(values, np.float32).astype(np.float16)
    blocks[..., place : place + 2] = halves[..., None].view(np.uint8)


def _pack_q8_0(values: Floats) -> Bytes:
    scale = _half(np.abs(values).max(1, keepdims=True) / 127)
    codes = _codes(values, scale, -127, 127).astype(np.int8)
    return np.hstack([_bytes(scale), codes.view(np.uint8)])


def _pack_q4_k(values: Floats) -> Bytes:
    parts = values.reshape(-1, 8, 32)
    low = np.minimum(parts.min(2), 0)
    steps = (parts.max(2) - low) / 15
    d = _half(steps.max(1, keepdims=True) / _SIX_BITS)
    dmin = _half(-low.min(1, keepdims=True) / _SIX_BITS)
    scales = _codes(steps, d, 0, _SIX_BITS).astype(np.uint8)
    minima = _codes(-low, dmin, 0, _SIX_BITS).astype(np.uint8)
    offsets = (dmin * minima)[:, :, None]
    codes = _codes(parts + offsets, (d * scales)[:, :, None], 0, 15).astype(np.uint8)
    packed = np.empty((len(values), 12), np.uint8)
    packed[:, 0:4] = scales[:, :4] | scales[:, 4:] >> 4 << 6
    packed[:, 4:8] = minima[:, :4] | minima[:, 4:] >> 4 << 6
    packed[:, 8:12] = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    nibbles = (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1, 128)
    return np.hstack([_bytes(d), _bytes(dmin), packed, nibbles])


def _pack_q6_k(values: Floats) -> Bytes:
    parts = values.reshape(-1, 16, 16)
    steps = np.abs(parts).max(2) / 31
    d = _half(steps.max(1, keepdims=True) / 127)
    scales = _codes(steps, d, 0, 127).astype(np.int8)
    codes = _codes(parts, (d * scales)[:, :, None], -32, 31) + 32
    whole = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (whole[:, :, :2] & 15 | (whole[:, :, 2:] & 15) << 4).reshape(-1, 128)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(whole >> 4 << shifts, axis=2).reshape(-1, 64)
    return np.hstack([low, high, scales.view(np.uint8), _bytes(d)])


def _half(values: Floats) -> Floats:
    """Return values rounded to float16."""
    return values.astype(np.float16).astype(np.float32)


def _codes(values: Floats, scale: Floats, least: int, most: int) -> Floats:
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    steps = values * inverse
    np.rint(steps, out=steps)
    return np.clip(steps, least, most, out=steps)


def _bytes(halves: Floats) -> Bytes:
    return halves.astype(np.float16).view(np.uint8)


def _rms(least: int, most: int) -> float:
    """Return integers of this range, equally often."""
    return math.sqrt(sum(n * n for n in range(least, most + 1)) / (most + 1 - least))


_Q4_K_MEAN = 7.5  # of a code, so that minima of this size leave no bias
_Q4_K_UNIT = math.sqrt(
    _rms(0, _SIX_BITS) ** 2 * (_rms(0, 15) ** 2 + _Q4_K_MEAN**2)
    - 2 * (_SIX_BITS / 2) ** 2 * _Q4_K_MEAN**2
)
BLOCKS = {
    "Q8_0": RowBlocks(8, 32, 34, 0, _rms(-128, 127), _pack_q8_0),
    "Q4_K": RowBlocks(12, 256, 144, 0, _Q4_K_UNIT, _pack_q4_k, _Q4_K_MEAN),
    "Q6_K": RowBlocks(14, 256, 210, 208, _rms(-128, 127) * _rms(-32, 31), _pack_q6_k),
}
