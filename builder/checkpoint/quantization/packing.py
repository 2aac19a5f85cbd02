"""Codes of at most eight bits packed into words or bytes, and small floats."""

from __future__ import annotations

import torch
from torch import Tensor

from specbuild.plugins_cuda.moe.e2m1 import E2M1_CODES

_WORD_BITS = 32
# Words that are unpacked together; temporaries have eight bytes for every code.
_PIECE_WORDS = 1 << 18
# Four-bit floats, times two.
_E2M1_DOUBLED = torch.tensor([round(2 * value) for value in E2M1_CODES], dtype=torch.int8)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Return codes uint8 [R, count] of int32 ``words`` [R, W]; code i begins at bit i · ``bits``.

    The lowest bits come first. Codes of 3, 5, 6 or 7 bits may span two words.
    """
    if _WORD_BITS % bits == 0:
        per_byte = 8 // bits
        raw = words.contiguous().view(torch.uint8)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        codes = raw[:, :, None].expand(-1, -1, per_byte) >> shifts & (1 << bits) - 1
        return codes.flatten(1)[:, :count].contiguous()
    first_bits = torch.arange(count) * bits
    first, shift = first_bits // _WORD_BITS, first_bits % _WORD_BITS
    second = (first + 1).clamp(max=words.shape[1] - 1)
    codes = torch.empty(words.shape[0], count, dtype=torch.uint8)
    step = max(1, _PIECE_WORDS // max(1, words.shape[1]))
    for row in range(0, len(words), step):
        wide = words[row : row + step].long() & 0xFFFFFFFF
        both = wide[:, first] | wide[:, second] << _WORD_BITS
        codes[row : row + step] = (both >> shift & (1 << bits) - 1).to(torch.uint8)
    return codes


def unpack_nibbles(raw: Tensor) -> Tensor:
    """Return codes uint8 [R, 2 · B] of bytes [R, B], the low nibble of a byte first."""
    return torch.stack((raw & 0xF, raw >> 4), dim=-1).flatten(1)


def unpack_e2m1(raw: Tensor) -> Tensor:
    """Return packed four-bit floats times two, int8 [R, 2 · B] of bytes [R, B]."""
    return _E2M1_DOUBLED[unpack_nibbles(raw).int()]


def float_scales(stored: Tensor) -> Tensor:
    """Return scales as float32; bytes are exponents (e8m0), of which 255 is NaN."""
    if stored.dtype == torch.uint8:
        stored = stored.view(torch.float8_e8m0fnu)
    return stored.float()
