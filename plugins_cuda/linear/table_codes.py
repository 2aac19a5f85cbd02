"""Storages whose four-bit values are places in a table.

For lane 4·g + t, blocks of 32 columns and halves h (rows g + 8·h), a unit has

    iq4         [lane][block][h] u32   places in IQ4_NL's table of columns 8t … 8t+7, four bits
                                       each, lowest first: 0 2 1 3 4 6 5 7
                [g][block][h] fp32     the scale of a row's 32 columns
    nvfp4       [lane][block][h] u32   twice e2m1 of columns 8t … 8t+7, as ``E2M1_WORDS``
                [g][h][4] u8           e4m3 scales of 16 columns each
                [h][2] fp32            the factor of eight rows' scales, times 2^120: rounded to
                                       fp32, and what remains

Scales of IQ4_XS are products of an fp16 and a six-bit number, which fp32 holds exactly. A
scale of NVFP4 is a product that is rounded to fp32. Where a checkpoint divides by the number of a
tensor, the factor is its inverse, of which fp32 has not enough bits to round each scale correctly.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.code_units import (
    UNIT_COLUMNS,
    by_lane,
    by_row,
    exact,
    from_lanes,
    joined_bytes,
    split_bytes,
    spread,
    whole_units,
)
from specbuild.plugins_cuda.linear.codec import (
    BLOCK_SCALE,
    SCALE,
    Codec,
    CodeForm,
    GroupedCodes,
)
from specbuild.plugins_cuda.linear.nibble_codes import lane_words, nibble_words, nibbles
from specbuild.plugins_cuda.linear.packing import BLOCK, HALF_ROWS, TILE_ROWS
from specbuild.plugins_cuda.linear.storage import IQ4, LOAD_BYTES, NVFP4
from specbuild.plugins_cuda.moe.e2m1 import E2M1_CODES, E2M1_WORDS
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    import torch

# The values of IQ4_NL and IQ4_XS in ggml.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the e2m1 values.
NVFP4_VALUES = tuple(round(2 * value) for value in E2M1_CODES)
_PLACE_BITS = 4
# The columns that take the places of columns 0 to 7 in a word of ``nibble_words``.
_WORD_ORDER = [0, 4, 2, 6, 1, 5, 3, 7]
_BYTE_BIAS = 128
_SCALE_COLUMNS = 16
_MAX_SCALE = 2.0
_FACTOR_UNIT = 2.0**120


@cache
def _places(values: tuple[int, ...]) -> torch.Tensor:
    """Return the first place of a value in the table at its index plus 128, u8."""
    import torch

    places = torch.zeros(2 * _BYTE_BIAS, dtype=torch.uint8)
    for value in set(values):
        places[value + _BYTE_BIAS] = values.index(value)
    return places


def _pack_iq4(weight: GroupedCodes) -> torch.Tensor:
    places = _places(IQ4_VALUES)[whole_units(weight.codes).int() + _BYTE_BIAS]
    columns = places.unflatten(1, (-1, len(_WORD_ORDER)))[..., _WORD_ORDER]
    scales = by_row(weight.numbers(SCALE).float(), 2).transpose(-1, -2)
    return joined_bytes(nibble_words(columns.flatten(1)), scales, size=IQ4.elements)


def _read_iq4(packed: torch.Tensor) -> torch.Tensor:
    import torch

    words, parts = split_bytes(packed, LOAD_BYTES, 8 * TILE_ROWS)
    scales = parts.view(torch.float32).unflatten(-1, (HALF_ROWS, 2, 2)).transpose(-1, -2)
    columns = nibbles(words)[..., torch.tensor(_WORD_ORDER).argsort()]
    values = torch.tensor(IQ4_VALUES).float()[from_lanes(columns).int()]
    return values * spread(scales, BLOCK)


def _takes_iq4(form: CodeForm) -> bool:
    return form.code_type == "iq4" and form.block[0] == 1


def _pack_nvfp4(weight: GroupedCodes) -> torch.Tensor:
    import torch

    scales = weight.numbers(SCALE)
    codes = _places(NVFP4_VALUES)[whole_units(weight.codes).int() + _BYTE_BIAS]
    lanes = by_lane(codes)
    words = E2M1_WORDS.placed(lanes[..., 0::2] | lanes[..., 1::2] << _PLACE_BITS)
    factors = by_row(weight.numbers(BLOCK_SCALE).double(), 1)
    # Rows that pad a tile have no factor, and scales of zero.
    shared = factors.amax(2, keepdim=True)
    of_groups = by_row(scales, 4)
    products = of_groups.double() * shared
    high = (shared * _FACTOR_UNIT).float()
    low = (shared * _FACTOR_UNIT - high.double()).float()
    shares = (factors == shared) | (factors == 0)
    rounds = _nvfp4_scales(of_groups, high, low) == products.float()
    if not (shares.all() and rounds.all() and (scales >= 0).all()):
        raise SpecbuildError(
            "the scales of an NVFP4 weight are not products of one positive factor for each eight "
            "rows, as kernels decode them; build with --weights-dtype bf16"
        )
    if not (products < _MAX_SCALE).all():
        raise SpecbuildError(
            f"an NVFP4 weight has a scale of {2 * float(products.max()):g}, expected less than "
            f"{2 * _MAX_SCALE:g}, which kernels decode; build with --weights-dtype bf16"
        )
    parts = torch.stack((high, low), dim=-1)  # [tile, unit, 1, h, 1, part]
    return joined_bytes(
        words, by_row(exact(scales, torch.float8_e4m3fn), 4), parts, size=NVFP4.elements
    )


def _read_nvfp4(packed: torch.Tensor) -> torch.Tensor:
    import torch

    words, scales, factors = split_bytes(packed, LOAD_BYTES, 4 * TILE_ROWS, _SCALE_COLUMNS)
    pairs = E2M1_WORDS.natural(lane_words(words, 2, 2, 1))
    codes = torch.stack((pairs & 15, pairs >> _PLACE_BITS), dim=-1).flatten(-2)
    values = torch.tensor(NVFP4_VALUES).float()[from_lanes(codes).int()]
    of_rows = scales.view(torch.float8_e4m3fn).float().unflatten(-1, (HALF_ROWS, 2, 4))
    high, low = factors.view(torch.float32).unflatten(-1, (1, 2, 1, 2)).unbind(-1)
    return values * spread(_nvfp4_scales(of_rows, high, low), _SCALE_COLUMNS)


def _nvfp4_scales(groups: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return fp32 scales as kernels compute them, with one rounding of the sum (fma)."""
    sums = groups.double() * high.double() + (groups * low).double()
    return (sums / _FACTOR_UNIT).float()


def _takes_nvfp4(form: CodeForm) -> bool:
    return form.code_type == "e2m1" and form.block == (1, _SCALE_COLUMNS) and form.has_factors


TABLE_CODECS = {
    IQ4: Codec({SCALE: BLOCK}, _PLACE_BITS, _takes_iq4, _pack_iq4, _read_iq4, IQ4_VALUES),
    NVFP4: Codec(
        {SCALE: _SCALE_COLUMNS, BLOCK_SCALE: UNIT_COLUMNS},
        _PLACE_BITS,
        _takes_nvfp4,
        _pack_nvfp4,
        _read_nvfp4,
        NVFP4_VALUES,
    ),
}
