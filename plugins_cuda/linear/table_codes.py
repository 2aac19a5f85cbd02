"""Storages whose four-bit values are places in a table of integers.

For lane 4·g + t, blocks of 32 columns and halves h (rows g + 8·h), a unit has

    iq4         [lane][block][h] u32   places in IQ4_NL's table of columns 8t … 8t+7, four bits
                                       each, lowest first: 0 2 1 3 4 6 5 7
                [g][block][h] fp32     the scale of a row's 32 columns

Scales of IQ4_XS are products of an fp16 and a six-bit number, which fp32 holds exactly.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.code_units import (
    by_row,
    from_lanes,
    joined_bytes,
    split_bytes,
    spread,
    whole_units,
)
from specbuild.plugins_cuda.linear.codec import SCALE, Codec, CodeForm, GroupedCodes
from specbuild.plugins_cuda.linear.nibble_codes import nibble_words, nibbles
from specbuild.plugins_cuda.linear.packing import BLOCK, HALF_ROWS, TILE_ROWS
from specbuild.plugins_cuda.linear.storage import IQ4, LOAD_BYTES

if TYPE_CHECKING:
    import torch

# The values of IQ4_NL and IQ4_XS in ggml.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_PLACE_BITS = 4
# The columns that take the places of columns 0 to 7 in a word of ``nibble_words``.
_WORD_ORDER = [0, 4, 2, 6, 1, 5, 3, 7]
_BYTE_BIAS = 128


@cache
def _places(values: tuple[int, ...]) -> torch.Tensor:
    """Return the place of a value in the table at its index plus 128, u8; others have place 0."""
    import torch

    places = torch.zeros(2 * _BYTE_BIAS, dtype=torch.uint8)
    places[torch.tensor(values) + _BYTE_BIAS] = torch.arange(len(values), dtype=torch.uint8)
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


TABLE_CODECS = {
    IQ4: Codec({SCALE: BLOCK}, _PLACE_BITS, _takes_iq4, _pack_iq4, _read_iq4, IQ4_VALUES),
}
