"""Blocks of quantised numbers to float32, as ggml defines them.

Every function takes raw blocks u8 [n, bytes] and fills ``out`` float32 [n, elements]. Products and
sums are rounded one after the other, which makes the results equal to ggml's bit for bit. Codes are
taken apart four to a 32-bit word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specbuild.plugins_cuda.moe.e2m1 import E2M1_CODES

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_LOW_NIBBLES = np.uint32(0x0F0F0F0F)
_BITS = np.arange(32, dtype=np.uint32)
# Smaller steps stay in the processor's cache, larger ones spend less of their time in Python.
STEP_ELEMENTS = 1 << 18


def dequantise(kind: str, raw: Bytes, out: Floats) -> None:
    """Fills ``out`` float32 [n, elements] with the numbers of ``raw`` u8 [n, bytes]."""
    unpack = _UNPACK[kind]
    step = max(1, STEP_ELEMENTS // out.shape[1])
    # A scale that is no number makes numbers that are none, which whoever streams them refuses.
    with np.errstate(all="ignore"):
        for first in range(0, len(raw), step):
            unpack(raw[first : first + step], out[first : first + step])


def is_quantised(kind: str) -> bool:
    """Whether numbers of this type are stored in blocks."""
    return kind in _UNPACK


def _q4_0(raw: Bytes, out: Floats) -> None:
    out.reshape(-1, 2, 16)[...] = _nibbles(raw[:, 2:], 16)[:, 0]
    out -= np.float32(8)
    out *= _halves(raw, 0)


def _q4_1(raw: Bytes, out: Floats) -> None:
    out.reshape(-1, 2, 16)[...] = _nibbles(raw[:, 4:], 16)[:, 0]
    out *= _halves(raw, 0)
    out += _halves(raw, 2)


def _q5_0(raw: Bytes, out: Floats) -> None:
    _five_bits(raw[:, 2:6], raw[:, 6:], out)
    out -= np.float32(16)
    out *= _halves(raw, 0)


def _q5_1(raw: Bytes, out: Floats) -> None:
    _five_bits(raw[:, 4:8], raw[:, 8:], out)
    out *= _halves(raw, 0)
    out += _halves(raw, 2)


def _q8_0(raw: Bytes, out: Floats) -> None:
    out[...] = raw[:, 2:].view(np.int8)
    out *= _halves(raw, 0)


def _q4_k(raw: Bytes, out: Floats) -> None:
    scales, minima = _scales_and_minima(raw)
    values = out.reshape(-1, 8, 32)
    values.reshape(-1, 4, 2, 32)[...] = _nibbles(raw[:, 16:], 32)
    _scaled(values, scales)
    _less(values, minima)


def _q5_k(raw: Bytes, out: Floats) -> None:
    scales, minima = _scales_and_minima(raw)
    codes = _nibbles(raw[:, 48:], 32).reshape(-1, 8, 32)
    fifth = _words(raw[:, 16:48])
    for part in range(8):
        bit = (fifth >> np.uint32(part) & np.uint32(0x01010101)) << np.uint32(4)
        codes[:, part] |= bit.view(np.uint8)
    values = out.reshape(-1, 8, 32)
    values[...] = codes
    _scaled(values, scales)
    _less(values, minima)


def _q6_k(raw: Bytes, out: Floats) -> None:
    low = _nibbles(raw[:, :128], 64).reshape(-1, 2, 4, 32)
    high = _words(raw[:, 128:192]).reshape(-1, 2, 8)
    for part in range(4):
        bits = (high >> np.uint32(2 * part) & np.uint32(0x03030303)) << np.uint32(4)
        low[:, :, part] |= bits.view(np.uint8)
    values = out.reshape(-1, 16, 16)
    values[...] = low.reshape(-1, 16, 16)
    values -= np.float32(32)
    scales = raw[:, 192:208].view(np.int8).astype(np.float32) * _halves(raw, 208)
    _scaled(values, scales[:, :, None])


def _mxfp4(raw: Bytes, out: Floats) -> None:
    np.take(_E2M1_DOUBLED, _nibbles(raw[:, 1:], 16).reshape(-1, 32), out=out)
    exponents = raw[:, :1].astype(np.uint32)
    # Half of the scale as the bits of a float32, which are a subnormal's for the two least.
    subnormal = np.uint32(1 << 21) << exponents
    bits = np.where(exponents < 2, subnormal, (exponents - np.uint32(1)) << np.uint32(23))
    out *= bits.view(np.float32)


# Without a negative zero, as ggml has them.
_E2M1_DOUBLED = np.array(E2M1_CODES, np.float32) * np.float32(2) + np.float32(0)
_UNPACK: dict[str, Callable[[Bytes, Floats], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}


def _scaled(values: Floats, factors: Floats) -> None:
    """``values *= factors``, by torch: numpy is slow where the last axis is one number."""
    torch.from_numpy(values).mul_(torch.from_numpy(factors))


def _less(values: Floats, parts: Floats) -> None:
    """``values -= parts``, by torch."""
    torch.from_numpy(values).sub_(torch.from_numpy(parts))


def _halves(raw: Bytes, place: int) -> Floats:
    """The float16 at byte ``place`` of every block, as float32 [n, 1]."""
    return np.ascontiguousarray(raw[:, place : place + 2]).view(np.float16).astype(np.float32)


def _words(raw: Bytes) -> NDArray[np.uint32]:
    """Bytes [n, 4·w] as words [n, w]."""
    return np.ascontiguousarray(raw).view(np.uint32)


def _nibbles(raw: Bytes, run: int) -> Bytes:
    """Bytes [n, b] as codes [n, b / run, 2, run]: of every run the low nibbles, then the high."""
    words = _words(raw)
    codes = np.empty((len(raw), raw.shape[1] // run, 2, run // 4), np.uint32)
    low = (words & _LOW_NIBBLES).reshape(len(raw), -1, run // 4)
    high = ((words >> np.uint32(4)) & _LOW_NIBBLES).reshape(low.shape)
    np.stack([low, high], axis=2, out=codes)
    return codes.view(np.uint8)


def _five_bits(high: Bytes, low: Bytes, out: Floats) -> None:
    """Codes of 32 numbers: nibbles [n, 16], and a word of fifth bits [n, 4]."""
    codes = _nibbles(low, 16).reshape(-1, 32)
    fifth: NDArray[Any] = (_words(high) >> _BITS & np.uint32(1)).astype(np.uint8)
    codes |= fifth << np.uint8(4)
    out[...] = codes


def _scales_and_minima(raw: Bytes) -> tuple[Floats, Floats]:
    """What the eight parts of a block are multiplied by, and what is taken off: [n, 8, 1] each."""
    first, second, third = np.ascontiguousarray(raw[:, 4:16]).view(np.uint32).T
    found = []
    for place, low, high in ((0, first, third), (2, second, third >> np.uint32(4))):
        six = np.empty((len(raw), 2), np.uint32)
        six[:, 0] = low & np.uint32(0x3F3F3F3F)
        six[:, 1] = (high & _LOW_NIBBLES) | ((low >> np.uint32(2)) & np.uint32(0x30303030))
        found.append((six.view(np.uint8) * _halves(raw, place))[:, :, None])
    return found[0], found[1]
