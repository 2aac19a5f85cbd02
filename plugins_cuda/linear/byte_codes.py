"""Storages with a byte per quantized value.

For lane 4·g + t, blocks of 32 columns and halves h (rows g + 8·h), a unit has

    q8          [block][lane][h][2] u32   values + 128 of columns 8t … 8t+3 and 8t+4 … 8t+7, in
    order
                [g][block][h] fp16        scales, or bf16
    mixed       [block][lane][h][2] u32   the same
                [g][h][4] fp32            scales of 16 columns each
                [g][h][block] fp32        minima
    fp8         [block][lane][h][2] u32   e4m3 of the same columns, as ``E4M3_WORDS``
    fp8-block   [h][2] bf16               two parts of the scale of eight rows' 64 columns
    fp8-rows    [g][h][2] bf16            two parts of the scale of a row's 64 columns

A kernel multiplies an e4m3 value by both parts of its scale in bf16 arithmetic: with one rounding
of the product with the second part, and one of the product with the first part plus it. The second
part is about the difference between the scale and the first part. It is chosen so that the result
is the bf16 number of the product in fp32, for every e4m3 value. Values with the same mantissa have
the same roundings, so a scale has eight products to check. A suitable second part exists for every
mantissa of a scale (``tests/ops/test_exact_scales.py``), at most two steps from the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.code_units import (
    UNIT_COLUMNS,
    by_lane,
    by_row,
    exact,
    from_lanes,
    joined_bytes,
    scale_type,
    split_bytes,
    spread,
    whole_units,
    within,
)
from specbuild.plugins_cuda.linear.codec import MINIMUM, SCALE, Codec, CodeForm, GroupedCodes
from specbuild.plugins_cuda.linear.packing import BLOCK, HALF_ROWS, TILE_ROWS
from specbuild.plugins_cuda.linear.storage import (
    FP8_BLOCK,
    FP8_ROWS,
    LOAD_BYTES,
    MIXED,
    Q8,
    Q8_BF16,
    Storage,
)
from specbuild.plugins_cuda.placed_words import PlacedWords
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    import torch

BYTE_BITS = 8
_BIAS = 128
# Four e4m3 values of a word: a mask moves the first two to bf16 pairs; the others take a rotation,
# a shift and two masks.
E4M3_WORDS = PlacedWords(
    (
        (4, 5, 6, 7, 8, 9, 10, 15),
        (20, 21, 22, 23, 24, 25, 26, 31),
        (0, 1, 2, 11, 12, 13, 14, 19),
        (16, 17, 18, 27, 28, 29, 30, 3),
    )
)
# Kernels multiply by 2^120 times a scale. The products of its second part are normal numbers.
_SCALE_LIMIT, _SCALE_UNIT, _SMALL_SCALE = 128.0, 2.0**120, 2.0**-90
_E4M3_MANTISSAS = range(8, 16)
_PART_STEPS = (0, 1, -1, 2, -2)
_MIXED_COLUMNS = 16


def _lane_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Convert bytes [N, complete units] to [tile, unit, block, g, t, h, 8]."""
    return by_lane(codes).permute(0, 1, 4, 2, 3, 5, 6)


def _from_lane_bytes(raw: torch.Tensor) -> torch.Tensor:
    """Invert :func:`_lane_bytes`, for bytes [tile, unit, 1024]."""
    lanes = raw.unflatten(-1, (2, HALF_ROWS, 4, 2, 8))
    return from_lanes(lanes.permute(0, 1, 3, 4, 2, 5, 6))


def _q8_codec(storage: Storage, scale_dtype: str) -> Codec:
    def pack(weight: GroupedCodes) -> torch.Tensor:
        import torch

        codes = (whole_units(weight.codes).to(torch.int16) + _BIAS).to(torch.uint8)
        scales = by_row(exact(weight.numbers(SCALE), scale_type(scale_dtype)), 2).transpose(-1, -2)
        return joined_bytes(_lane_bytes(codes), scales, size=storage.elements)

    def values(packed: torch.Tensor) -> torch.Tensor:
        raw, scales = split_bytes(packed, 2 * LOAD_BYTES, 4 * TILE_ROWS)
        of_blocks = (
            scales.view(scale_type(scale_dtype)).unflatten(-1, (HALF_ROWS, 2, 2)).transpose(-1, -2)
        )
        return (_from_lane_bytes(raw).float() - _BIAS) * spread(of_blocks, BLOCK)

    def takes(form: CodeForm) -> bool:
        whole = form.code_type in ("int", "iq4") and form.block[0] == 1 and not form.has_minima
        return whole and form.scale_dtype == scale_dtype and not form.has_zero_points

    return Codec({SCALE: BLOCK}, BYTE_BITS, takes, pack, values)


def _pack_mixed(weight: GroupedCodes) -> torch.Tensor:
    import torch

    codes = (whole_units(weight.codes).to(torch.int16) + _BIAS).to(torch.uint8)
    scales = by_row(weight.numbers(SCALE).float(), 4)
    minima = by_row(weight.numbers(MINIMUM).float(), 2)
    return joined_bytes(_lane_bytes(codes), scales, minima, size=MIXED.elements)


def _read_mixed(packed: torch.Tensor) -> torch.Tensor:
    import torch

    raw, scales, minima = split_bytes(packed, 2 * LOAD_BYTES, 16 * TILE_ROWS, 8 * TILE_ROWS)
    of_groups = scales.view(torch.float32).unflatten(-1, (HALF_ROWS, 2, 4))
    of_blocks = minima.view(torch.float32).unflatten(-1, (HALF_ROWS, 2, 2))
    values = (_from_lane_bytes(raw).float() - _BIAS) * spread(of_groups, _MIXED_COLUMNS)
    return values + spread(of_blocks, BLOCK)


def _takes_mixed(form: CodeForm) -> bool:
    # Zero points become minima: products of them and scales of 11 bits are exact.
    is_exact = not form.has_zero_points or form.scale_dtype in ("F16", "BF16")
    has_addends = form.has_minima or form.has_zero_points
    is_whole = form.code_type in ("int", "iq4") and form.block[0] == 1
    return is_whole and is_exact and not (has_addends and form.block[1] % BLOCK)


def _pack_fp8_block(weight: GroupedCodes) -> torch.Tensor:
    scales = by_row(weight.numbers(SCALE), 1)
    if not (scales[:, :, :1] == scales).all():
        raise AssertionError("eight rows of a tile have different scales")
    return _pack_fp8(weight, scales[:, :, 0], FP8_BLOCK)


def _pack_fp8_rows(weight: GroupedCodes) -> torch.Tensor:
    return _pack_fp8(weight, by_row(weight.numbers(SCALE), 1), FP8_ROWS)


def _pack_fp8(weight: GroupedCodes, scales: torch.Tensor, storage: Storage) -> torch.Tensor:
    import torch

    wrong = scales[~((scales == 0) | within(scales, _SMALL_SCALE, _SCALE_LIMIT))]
    if len(wrong):
        raise SpecbuildError(
            f"an FP8 weight has a scale of {float(wrong[0]):g}, expected 0 or {_SMALL_SCALE:g} to "
            f"{_SCALE_LIMIT:g}, which kernels decode; build with --weights-dtype bf16"
        )
    codes = whole_units(weight.codes.view(torch.uint8))
    words = E4M3_WORDS.placed(_lane_bytes(codes).contiguous())
    distinct, places = scales.float().unique(return_inverse=True)
    parts = (scale_parts(distinct).float() * _SCALE_UNIT).to(torch.bfloat16)
    return joined_bytes(words, parts[places], size=storage.elements)


def scale_parts(scales: torch.Tensor) -> torch.Tensor:
    """Split fp32 scales [N] into bf16 parts [N, 2] whose products have the bits of fp32 products.

    Raises AssertionError if a scale has no such parts.
    """
    import torch

    mantissas = torch.tensor(_E4M3_MANTISSAS, dtype=torch.float32)[:, None]
    first = scales.to(torch.bfloat16)
    difference = (scales - first.float()).to(torch.bfloat16).view(torch.int16)
    second = torch.empty_like(first)
    left = torch.arange(len(scales))
    for step in _PART_STEPS:
        second[left] = (difference[left] + step).view(torch.bfloat16)
        parts = torch.stack((first[left], second[left]), dim=-1)
        expected = (mantissas * scales[left]).to(torch.bfloat16)
        products = scaled_by_parts(mantissas, parts).to(torch.bfloat16)
        left = left[(products != expected).any(0)]
        if not len(left):
            return torch.stack((first, second), dim=-1)
    raise AssertionError(f"the scale {float(scales[left[0]])!r} has no two parts in bf16")


def scaled_by_parts(values: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """Multiply fp32 values by scales of two parts, in fp32 numbers that round to a kernel's bf16.

    ``values`` is broadcast to the shape of ``parts`` without its last axis, of two bf16 numbers.
    """
    import torch

    first, second = parts.double().unbind(-1)
    # Products of four and eight bits are exact in fp32, and their sum in fp64.
    exact = values.double() * first + (values * second.float()).to(torch.bfloat16).double()
    nearest = exact.float()
    error = exact - nearest.double()
    # Round to odd, so that the second rounding to bf16 is that of the exact sum.
    bits = nearest.view(torch.int32)
    step = torch.where((error > 0) == (nearest > 0), 1, -1).to(torch.int32)
    return torch.where((error != 0) & (bits % 2 == 0), bits + step, bits).view(torch.float32)


def _read_fp8_block(packed: torch.Tensor) -> torch.Tensor:
    import torch

    raw, scales = split_bytes(packed, 2 * LOAD_BYTES, 8)
    halves = scales.view(torch.bfloat16).unflatten(-1, (1, 2, 1, 2))
    return _fp8_values(raw, halves.expand(-1, -1, HALF_ROWS, -1, -1, -1))


def _read_fp8_rows(packed: torch.Tensor) -> torch.Tensor:
    import torch

    raw, scales = split_bytes(packed, 2 * LOAD_BYTES, 4 * TILE_ROWS)
    return _fp8_values(raw, scales.view(torch.bfloat16).unflatten(-1, (HALF_ROWS, 2, 1, 2)))


def _fp8_values(raw: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return fp32 values [N, K] of e4m3 words and the parts of scales [tile, unit, g, h, 1, 2]."""
    import torch

    codes = E4M3_WORDS.natural(raw.view(torch.int32)).view(torch.float8_e4m3fn)
    parts = [spread(part / _SCALE_UNIT, UNIT_COLUMNS) for part in scales.unbind(-1)]
    return scaled_by_parts(_from_lane_bytes(codes.float()), torch.stack(parts, dim=-1))


def _takes_fp8_block(form: CodeForm) -> bool:
    return form.code_type == "e4m3" and form.block[0] % HALF_ROWS == 0


def _takes_fp8_rows(form: CodeForm) -> bool:
    return form.code_type == "e4m3"


_COLUMNS = {SCALE: UNIT_COLUMNS}
BYTE_CODECS = {
    Q8: _q8_codec(Q8, "F16"),
    Q8_BF16: _q8_codec(Q8_BF16, "BF16"),
    FP8_BLOCK: Codec(_COLUMNS, BYTE_BITS, _takes_fp8_block, _pack_fp8_block, _read_fp8_block),
    FP8_ROWS: Codec(_COLUMNS, BYTE_BITS, _takes_fp8_rows, _pack_fp8_rows, _read_fp8_rows),
    # After the storages that it can replace.
    MIXED: Codec(
        {SCALE: _MIXED_COLUMNS, MINIMUM: BLOCK}, BYTE_BITS, _takes_mixed, _pack_mixed, _read_mixed
    ),
}
