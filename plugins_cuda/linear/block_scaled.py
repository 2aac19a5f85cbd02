"""Dense weights with a power-of-two scale per 32 columns: MXFP4, fp8 as MXFP8, and int8.

The first two are formats of the OCP Microscaling Formats specification, version 1.0: elements are
e2m1 or e4m3, with an e8m0 scale for a block of 32 values of a row. The exponent of a scale is that
of the block's largest magnitude minus that of the largest element (section 6.3). It is one more if
that magnitude would otherwise be rounded beyond this element. Elements are rounded to nearest even.
Scales are bounded so that kernels decode every element exactly in bf16.

An int8 element is a sign and a magnitude up to 127. Its scale counts from −260 instead of −127,
because a magnitude is placed in the bits of the smallest bf16 numbers, which are multiples of
2^-133. The largest scale is 2^-6. Larger values are stored as the largest element, because the
products of int8 serve as a prefilter only, whose error is measured (``head_screen``).

Two blocks of a bf16 weight packed by ``pack_rows``, [N/16, K/32, 512], form a *unit*; an odd last
block is paired with a block of zeros. For lane 4·g + t and halves h (rows g + 8·h), a unit has

    mxfp4   [lane][block][h] u32       8 values: columns 8t … 8t+7, placed as ``E2M1_WORDS``
    fp8     [block][lane][h][2] u32    4 values: columns 8t … 8t+3 or 8t+4 … 8t+7, as ``E4M3_WORDS``
    int8    [block][lane][h][2] u32    4 values of the same columns, as ``_INT8_WORDS``
    all     [g][block][h] u8           the scales
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from specbuild.plugins_cuda.launches import TensorInfo
from specbuild.plugins_cuda.linear.byte_codes import E4M3_WORDS
from specbuild.plugins_cuda.linear.group_codes import GROUP_STORAGES, decoded_codes
from specbuild.plugins_cuda.linear.packing import BLOCK, HALF_ROWS, TILE_VALUES
from specbuild.plugins_cuda.linear.storage import (
    BF16,
    FP8,
    INT8,
    LOAD_BYTES,
    MXFP4,
    Storage,
    storage_of,
)
from specbuild.plugins_cuda.moe.e2m1 import E2M1, E2M1_CODES, E2M1_WORDS
from specbuild.plugins_cuda.placed_words import PlacedWords
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    import torch

# Values that are quantized at once, to limit the memory: about 100 bytes each.
_CHUNK_VALUES = 1 << 22
_SCALE_BIAS = 127
# Magnitudes in the lower bits of a half, signs in its highest: by a mask, or two rotations by
# eight.
_INT8_WORDS = PlacedWords(
    (
        (0, 1, 2, 3, 4, 5, 6, 15),
        (16, 17, 18, 19, 20, 21, 22, 31),
        (8, 9, 10, 11, 12, 13, 14, 7),
        (24, 25, 26, 27, 28, 29, 30, 23),
    )
)
_MAX_INT8 = 127


@dataclass(frozen=True)
class _Element:
    """A format of elements.

    ``largest_exponent`` is that of the largest element. A block whose mantissa exceeds
    ``most_mantissa`` needs a scale with one more. Scale bytes are between ``least_scale`` and
    ``largest_scale`` and count from ``bias``. ``codes`` quantizes values that were divided by their
    scale. With ``saturates``, larger values are stored as the largest element.
    """

    largest_exponent: int
    most_mantissa: float
    least_scale: int
    largest_scale: int
    codes: Callable[[torch.Tensor], torch.Tensor]
    bias: int = _SCALE_BIAS
    saturates: bool = False


def quantised(packed: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Convert a packed bf16 weight [tiles, blocks, 512] to ``storage``: u8 [tiles, units,
    elements].

    Raises SpecbuildError for values that are larger than kernels decode.
    """
    import torch

    if storage is BF16:
        return packed
    tiles, blocks, _ = packed.shape
    shape = (tiles, storage.units(blocks), storage.elements)
    result = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    if packed.is_meta:
        return result
    step = max(1, _CHUNK_VALUES // (blocks * TILE_VALUES))
    for first in range(0, tiles, step):
        result[first : first + step] = _quantised_tiles(packed[first : first + step], storage)
    return result


def rounded(weight: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Return a weight [..., K] rounded to ``storage``, in the type of the weight.

    It is rounded to bf16 first, and an incomplete last block is padded with zeros. Raises
    SpecbuildError for values that are larger than kernels decode.
    """
    import torch
    from torch.nn import functional as F

    if storage is BF16 or weight.is_meta:
        return weight.clone()
    element, rows = _ELEMENTS[storage], weight.flatten(0, -2)
    result, columns = torch.empty_like(rows), rows.shape[1]
    step = max(1, _CHUNK_VALUES // columns)
    for first in range(0, len(rows), step):
        part = rows[first : first + step].bfloat16().float()
        blocks = F.pad(part, (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
        codes, scales = _encoded(blocks, element)
        values = _VALUES[storage](codes)
        values = torch.ldexp(values, scales.int().unsqueeze(-1) - element.bias)
        result[first : first + step] = values.flatten(1)[:, :columns].to(weight.dtype)
    return result.view(weight.shape)


def mxfp4_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert a weight [..., K] to MXFP4: blocks u8 [..., K/32, 16], even elements low, and scales
    u8.

    Raises SpecbuildError for values that are larger than kernels decode.
    """
    import torch

    shape = (*weight.shape[:-1], weight.shape[-1] // BLOCK)
    if weight.is_meta:
        result = torch.empty(*shape, BLOCK // 2, dtype=torch.uint8, device=weight.device)
        return result, result[..., 0]
    codes, scales = _encoded(weight.float().unflatten(-1, (-1, BLOCK)), _ELEMENTS[MXFP4])
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales


def decoded(packed: torch.Tensor, columns: int, storage: Storage | None = None) -> torch.Tensor:
    """Convert a packed weight of any storage to bf16 values [tiles, columns/32, 512].

    ``storage`` is required for int8.
    """
    import torch

    if packed.dtype.is_floating_point:
        return packed
    dtype = str(packed.dtype).removeprefix("torch.")
    storage = storage or storage_of(TensorInfo(tuple(packed.shape), dtype))
    if storage in GROUP_STORAGES:
        return decoded_codes(packed, columns, storage)
    tiles, units, _ = packed.shape
    data, rates = packed.split([storage.loads * LOAD_BYTES, storage.elements % LOAD_BYTES], dim=2)
    values = _READERS[storage](data.contiguous().view(torch.int32))
    scales = rates.reshape(tiles, units, HALF_ROWS, 2, 2).permute(0, 1, 3, 4, 2)
    values = torch.ldexp(values, scales.int().unsqueeze(-1) - _ELEMENTS[storage].bias)
    return values.reshape(tiles, 2 * units, TILE_VALUES)[:, : columns // BLOCK].bfloat16()


def _quantised_tiles(packed: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Convert bf16 [tiles, blocks, 512] to u8 [tiles, units, elements]."""
    import torch
    from torch.nn import functional as F

    tiles, blocks, _ = packed.shape
    units = storage.units(blocks)
    padded = F.pad(packed.float(), (0, 0, 0, 2 * units - blocks))
    rows = padded.view(tiles, units, 2, 2, HALF_ROWS, BLOCK)  # [tile, unit, block, h, g, column]
    codes, scales = _encoded(rows, _ELEMENTS[storage])
    words = _WORDS[storage](codes)
    return torch.cat(
        [
            words.reshape(tiles, units, -1).contiguous().view(torch.uint8),
            scales.permute(0, 1, 4, 2, 3).reshape(tiles, units, -1),
        ],
        dim=2,
    )


def _encoded(values: torch.Tensor, element: _Element) -> tuple[torch.Tensor, torch.Tensor]:
    """Return quantized u8 like ``values`` [..., 32], and scales u8 [...]; SpecbuildError if too
    large.
    """
    import torch

    largest = torch.frexp(values.abs().amax(-1, keepdim=True))
    shared = largest.exponent - 1 - element.largest_exponent
    shared = shared + (2 * largest.mantissa > element.most_mantissa)
    scales = (shared + element.bias).clamp_min(element.least_scale)
    if element.saturates:
        scales = scales.clamp_max(element.largest_scale)
    if int(scales.max()) > element.largest_scale:
        raise SpecbuildError(
            f"a weight of {float(values.abs().max()):g} is larger than the kernels decode "
            f"(scales up to 2^{element.largest_scale - _SCALE_BIAS}); build with --draft-dtype "
            "bf16, or --weights-dtype bf16"
        )
    codes = element.codes(torch.ldexp(values, element.bias - scales))
    return codes, scales.squeeze(-1).to(torch.uint8)


def _e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    import torch

    codes = torch.bucketize(values.abs(), _e2m1_bounds(), out_int32=True).to(torch.uint8)
    return codes | (values < 0).to(torch.uint8) << 3


@cache
def _e2m1_bounds() -> torch.Tensor:
    """Return the largest number that rounds to each magnitude but the last; ties go to even."""
    import torch

    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1)])
    below = torch.nextafter(middles, torch.zeros(()))
    return torch.where(torch.arange(len(middles)) % 2 == 0, middles, below)


def _e4m3_codes(values: torch.Tensor) -> torch.Tensor:
    import torch

    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def _int8_codes(values: torch.Tensor) -> torch.Tensor:
    import torch

    magnitudes = values.abs().round().clamp_max(_MAX_INT8).to(torch.uint8)
    return magnitudes | (values < 0).to(torch.uint8) << 7


# bf16 holds 2^-133 … 2^127·1.99. This includes 2^(scale − 1) and 2^(scale − 7), and the smallest
# element, 2^-1 or 2^-9, times 2^(scale − 127). 7 and 464 are half way from the largest element to
# the next number.
_ELEMENTS = {
    MXFP4: _Element(2, 7 / 4, 1, 128, _e2m1_codes),
    FP8: _Element(8, 464 / 256, 7, 134, _e4m3_codes),
    # The largest magnitude that rounds to 127 or less; 2^-133 and 2^-6.
    INT8: _Element(6, _MAX_INT8 / 64, 127, 254, _int8_codes, bias=260, saturates=True),
}


def _mxfp4_words(codes: torch.Tensor) -> torch.Tensor:
    """Convert values [tile, unit, block, h, g, 32] to int32 [tile, unit, g, t, block, h]."""
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    return E2M1_WORDS.placed(pairs).permute(0, 1, 4, 5, 2, 3)


def _read_mxfp4(words: torch.Tensor) -> torch.Tensor:
    """Invert it: int32 [tile, unit, words] → fp32 [tile, unit, block, h, g, 32]."""
    import torch

    tiles, units, _ = words.shape
    ordered = words.view(tiles, units, HALF_ROWS, 4, 2, 2).permute(0, 1, 4, 5, 2, 3)
    pairs = E2M1_WORDS.natural(ordered)
    return _e2m1_values(torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2))


def _e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.tensor(E2M1_CODES)[codes.int()]


def _fp8_words(codes: torch.Tensor) -> torch.Tensor:
    return _byte_words(codes, E4M3_WORDS)


def _int8_words(codes: torch.Tensor) -> torch.Tensor:
    return _byte_words(codes, _INT8_WORDS)


def _byte_words(codes: torch.Tensor, placed: PlacedWords) -> torch.Tensor:
    """Convert bytes [tile, unit, block, h, g, 32] to int32 [tile, unit, block, g, t, h, 2]."""
    words = placed.placed(codes).unflatten(-1, (4, 2))
    return words.permute(0, 1, 2, 4, 5, 3, 6)


def _read_fp8(words: torch.Tensor) -> torch.Tensor:
    return _e4m3_values(_read_bytes(words, E4M3_WORDS)).flatten(5)


def _e4m3_values(codes: torch.Tensor) -> torch.Tensor:
    import torch

    return codes.view(torch.float8_e4m3fn).float()


def _read_int8(words: torch.Tensor) -> torch.Tensor:
    return _int8_values(_read_bytes(words, _INT8_WORDS)).flatten(5)


def _int8_values(codes: torch.Tensor) -> torch.Tensor:
    return (codes & _MAX_INT8).float() * (1 - 2 * (codes >> 7).float())


def _read_bytes(words: torch.Tensor, placed: PlacedWords) -> torch.Tensor:
    """Invert :func:`_byte_words`: u8 [tile, unit, block, h, g, 4, 8]."""
    tiles, units, _ = words.shape
    ordered = words.view(tiles, units, 2, HALF_ROWS, 4, 2, 2).permute(0, 1, 2, 5, 3, 4, 6)
    return placed.natural(ordered.flatten(-2))


_WORDS = {MXFP4: _mxfp4_words, FP8: _fp8_words, INT8: _int8_words}
_VALUES = {MXFP4: _e2m1_values, FP8: _e4m3_values, INT8: _int8_values}
_READERS = {MXFP4: _read_mxfp4, FP8: _read_fp8, INT8: _read_int8}
