"""Blocks of quantized numbers as codes, scales and minima, and as float32, as in ggml.

Products and sums are rounded one after the other, so that the numbers equal ggml's bit for bit.
Codes are unpacked four to a 32-bit word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specbuild.builder.checkpoint.quantization.tensor import CodeType
from specbuild.plugins_cuda.linear.table_codes import IQ4_VALUES
from specbuild.plugins_cuda.moe.e2m1 import E2M1_CODES

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Integers = NDArray[np.int8] | Bytes
Parts = tuple[Integers, Floats, Floats | None]
Factors = tuple[Floats, Integers | Floats, Floats | None, Integers | None]

_LOW_NIBBLES = np.uint32(0x0F0F0F0F)
_LOW_PAIRS = np.uint32(0x03030303)
_ONES = np.uint32(0x01010101)
_BITS = np.arange(32, dtype=np.uint32)
# Smaller steps stay in the processor's cache, larger ones spend less time in Python.
STEP_ELEMENTS = 1 << 18


def dequantise(kind: str, raw: Bytes, out: Floats) -> None:
    """Fill ``out`` float32 [n, elements] with the numbers of ``raw`` u8 [n, bytes]."""
    layout = _LAYOUTS[kind]
    step = max(1, STEP_ELEMENTS // out.shape[1])
    # A scale that is NaN makes numbers that are NaN, which the streaming check refuses.
    with np.errstate(all="ignore"):
        for first in range(0, len(raw), step):
            codes, scales, minima = layout.unpack(raw[first : first + step])
            piece = out[first : first + step]
            piece[...] = codes
            values = torch.from_numpy(piece).view(len(piece), -1, layout.group)
            values.mul_(torch.from_numpy(scales)[:, :, None])
            if minima is not None:
                values.add_(torch.from_numpy(minima)[:, :, None])


def block_layout(kind: str) -> BlockLayout | None:
    """Return the layout of blocks of this type; None if its numbers are not in blocks."""
    return _LAYOUTS.get(kind)


def is_quantised(kind: str) -> bool:
    """Return whether numbers of this type are stored in blocks."""
    return kind in _LAYOUTS


@dataclass(frozen=True)
class BlockLayout:
    """The codes of a type of blocks: their meaning, their bits, and elements per scale.

    ``unpack`` takes raw blocks u8 [n, bytes] and returns codes int8 or uint8 [n, elements], scales
    float32 [n, elements / group], and minima of that shape or None. An element is code · scale +
    minimum. If scales are products, ``factors`` takes the same and returns a scale of the block
    float32 [n, 1], integers of the groups [n, elements / group], and the same for minima or None.
    Those of NVFP4 have the types that ``ScaleFactors`` describes.
    """

    unpack: Callable[[Bytes], Parts]
    code_type: CodeType
    bits: int
    group: int
    has_minima: bool = False
    factors: Callable[[Bytes], Factors] | None = None


def _q4_0(raw: Bytes) -> Parts:
    codes = _nibbles(raw[:, 2:], 16).reshape(-1, 32)
    return _less(codes, 8), _halves(raw, 0), None


def _q4_1(raw: Bytes) -> Parts:
    return _nibbles(raw[:, 4:], 16).reshape(-1, 32), _halves(raw, 0), _halves(raw, 2)


def _q5_0(raw: Bytes) -> Parts:
    return _less(_five_bits(raw[:, 2:6], raw[:, 6:]), 16), _halves(raw, 0), None


def _q5_1(raw: Bytes) -> Parts:
    return _five_bits(raw[:, 4:8], raw[:, 8:]), _halves(raw, 0), _halves(raw, 2)


def _q8_0(raw: Bytes) -> Parts:
    return raw[:, 2:].view(np.int8), _halves(raw, 0), None


def _q2_k(raw: Bytes) -> Parts:
    parts = raw[:, :16]
    scales = (parts & np.uint8(15)) * _halves(raw, 80)
    minima = (parts >> np.uint8(4)) * _halves(raw, 82)
    return _two_bits(raw[:, 16:80]), scales, -minima


def _q3_k(raw: Bytes) -> Parts:
    mask = _words(raw[:, :32])
    high = np.empty((len(raw), 8, 8), np.uint32)
    for part in range(8):
        high[:, part] = (mask >> np.uint32(part) & _ONES) << np.uint32(2)
    codes = _two_bits(raw[:, 32:96]) | high.view(np.uint8).reshape(-1, 256)
    scale, groups, _, _ = _q3_k_factors(raw)
    return _less(codes, 4), groups * scale, None


def _q3_k_factors(raw: Bytes) -> Factors:
    first, second, third = _words(raw[:, 96:108]).T
    six = np.empty((len(raw), 4), np.uint32)
    for place, low in enumerate((first, second, first >> np.uint32(4), second >> np.uint32(4))):
        bits = third >> np.uint32(2 * place) & _LOW_PAIRS
        six[:, place] = low & _LOW_NIBBLES | bits << np.uint32(4)
    return _halves(raw, 108), _less(six.view(np.uint8), 32), None, None


def _q4_k(raw: Bytes) -> Parts:
    return _nibbles(raw[:, 16:], 32).reshape(-1, 256), *_scales_and_minima(raw)


def _q5_k(raw: Bytes) -> Parts:
    codes = _nibbles(raw[:, 48:], 32).reshape(-1, 8, 32)
    fifth = _words(raw[:, 16:48])
    for part in range(8):
        bit = (fifth >> np.uint32(part) & _ONES) << np.uint32(4)
        codes[:, part] |= bit.view(np.uint8)
    return codes.reshape(-1, 256), *_scales_and_minima(raw)


def _q6_k(raw: Bytes) -> Parts:
    low = _nibbles(raw[:, :128], 64).reshape(-1, 2, 4, 32)
    high = _words(raw[:, 128:192]).reshape(-1, 2, 8)
    for part in range(4):
        bits = (high >> np.uint32(2 * part) & _LOW_PAIRS) << np.uint32(4)
        low[:, :, part] |= bits.view(np.uint8)
    scales = raw[:, 192:208].view(np.int8).astype(np.float32) * _halves(raw, 208)
    return _less(low.reshape(-1, 256), 32), scales, None


def _iq4_nl(raw: Bytes) -> Parts:
    return _IQ4_TABLE[_nibbles(raw[:, 2:], 16).reshape(-1, 32)], _halves(raw, 0), None


def _iq4_xs(raw: Bytes) -> Parts:
    codes = _IQ4_TABLE[_nibbles(raw[:, 8:], 16).reshape(-1, 256)]
    high = np.ascontiguousarray(raw[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    low = np.stack([raw[:, 4:8] & np.uint8(15), raw[:, 4:8] >> np.uint8(4)], 2).reshape(-1, 8)
    six = low | (high.astype(np.uint8) & np.uint8(3)) << np.uint8(4)
    return codes, _less(six, 32) * _halves(raw, 0), None


def _mxfp4(raw: Bytes) -> Parts:
    codes = _E2M1_DOUBLED[_nibbles(raw[:, 1:], 16).reshape(-1, 32)]
    exponents = raw[:, :1].astype(np.uint32)
    # Half of the scale as the bits of a float32, which are a subnormal's for the two least.
    subnormal = np.uint32(1 << 21) << exponents
    bits = np.where(exponents < 2, subnormal, (exponents - np.uint32(1)) << np.uint32(23))
    return codes, bits.view(np.float32), None


def _nvfp4(raw: Bytes) -> Parts:
    codes = _E2M1_DOUBLED[_nibbles(raw[:, 4:], 8).reshape(-1, 64)]
    return codes, _HALF_UE4M3[raw[:, :4]], None


def _nvfp4_factors(raw: Bytes) -> Factors:
    return np.full((len(raw), 1), 0.5, np.float32), 2 * _HALF_UE4M3[raw[:, :4]], None, None


# e2m1 codes as integers, without a negative zero, as in ggml.
_E2M1_DOUBLED = (np.array(E2M1_CODES) * 2).astype(np.int8)
_IQ4_TABLE = np.array(IQ4_VALUES, np.int8)


def _half_ue4m3() -> Floats:
    """Return half of every scale of NVFP4; ggml ignores the sign and has no NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    halves = (codes & 0x7F).view(torch.float8_e4m3fn).float() / 2
    halves[0x7F] = 0
    # ggml tests for 0x7F with the sign, so that 0xFF is a number to it: 480.
    halves[0xFF] = 240
    return halves.numpy()


_HALF_UE4M3 = _half_ue4m3()


def _less(codes: Bytes, middle: int) -> NDArray[np.int8]:
    """Return unsigned codes as distances from ``middle``."""
    distances = codes - np.uint8(middle)
    return distances.view(np.int8)


def _halves(raw: Bytes, place: int) -> Floats:
    """Return the float16 at byte ``place`` of every block, as float32 [n, 1]."""
    return np.ascontiguousarray(raw[:, place : place + 2]).view(np.float16).astype(np.float32)


def _words(raw: Bytes) -> NDArray[np.uint32]:
    """Return bytes [n, 4·w] as words [n, w]."""
    return np.ascontiguousarray(raw).view(np.uint32)


def _nibbles(raw: Bytes, run: int) -> Bytes:
    """Return bytes [n, b] as codes [n, b / run, 2, run]: low nibbles of every run, then high."""
    words = _words(raw)
    codes = np.empty((len(raw), raw.shape[1] // run, 2, run // 4), np.uint32)
    low = (words & _LOW_NIBBLES).reshape(len(raw), -1, run // 4)
    high = ((words >> np.uint32(4)) & _LOW_NIBBLES).reshape(low.shape)
    np.stack([low, high], axis=2, out=codes)
    return codes.view(np.uint8)


def _two_bits(raw: Bytes) -> Bytes:
    """Return codes of 256 numbers: of each 32 bytes the lowest two bits, then the next two."""
    words = _words(raw).reshape(-1, 2, 8)
    codes = np.empty((len(raw), 2, 4, 8), np.uint32)
    for part in range(4):
        codes[:, :, part] = words >> np.uint32(2 * part) & _LOW_PAIRS
    return codes.view(np.uint8).reshape(-1, 256)


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """Return codes of 32 numbers: nibbles [n, 16], and a word of fifth bits [n, 4]."""
    codes = _nibbles(low, 16).reshape(-1, 32)
    fifth: NDArray[Any] = (_words(high) >> _BITS & np.uint32(1)).astype(np.uint8)
    codes |= fifth << np.uint8(4)
    return codes


def _scales_and_minima(raw: Bytes) -> tuple[Floats, Floats]:
    """Return scales and minima of the eight parts of a block, [n, 8] each."""
    scale, scales, minimum, minima = _k_factors(raw)
    assert minimum is not None and minima is not None
    return scales * scale, minima * minimum


def _k_factors(raw: Bytes) -> Factors:
    """Return a block's scale and the multiples of its parts; the same for (negative) minima."""
    first, second, third = np.ascontiguousarray(raw[:, 4:16]).view(np.uint32).T
    found = []
    for low, high in ((first, third), (second, third >> np.uint32(4))):
        six = np.empty((len(raw), 2), np.uint32)
        six[:, 0] = low & np.uint32(0x3F3F3F3F)
        six[:, 1] = (high & _LOW_NIBBLES) | ((low >> np.uint32(2)) & np.uint32(0x30303030))
        found.append(six.view(np.uint8))
    return _halves(raw, 0), found[0], -_halves(raw, 2), found[1]


def _q6_k_factors(raw: Bytes) -> Factors:
    return _halves(raw, 208), raw[:, 192:208].view(np.int8), None, None


_LAYOUTS = {
    "Q4_0": BlockLayout(_q4_0, "int", 4, 32),
    "Q4_1": BlockLayout(_q4_1, "int", 4, 32, has_minima=True),
    "Q5_0": BlockLayout(_q5_0, "int", 5, 32),
    "Q5_1": BlockLayout(_q5_1, "int", 5, 32, has_minima=True),
    "Q8_0": BlockLayout(_q8_0, "int", 8, 32),
    "Q2_K": BlockLayout(_q2_k, "int", 2, 16, has_minima=True),
    "Q3_K": BlockLayout(_q3_k, "int", 3, 16, factors=_q3_k_factors),
    "Q4_K": BlockLayout(_q4_k, "int", 4, 32, has_minima=True, factors=_k_factors),
    "Q5_K": BlockLayout(_q5_k, "int", 5, 32, has_minima=True, factors=_k_factors),
    "Q6_K": BlockLayout(_q6_k, "int", 6, 16, factors=_q6_k_factors),
    "IQ4_NL": BlockLayout(_iq4_nl, "iq4", 4, 32),
    "IQ4_XS": BlockLayout(_iq4_xs, "iq4", 4, 32),
    "MXFP4": BlockLayout(_mxfp4, "e2m1", 4, 32),
    "NVFP4": BlockLayout(_nvfp4, "e2m1", 4, 16, factors=_nvfp4_factors),
}
