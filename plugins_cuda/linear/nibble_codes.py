"""Storages with four bits of each value in a word, and further bits after them.

For lane 4·g + t, blocks of 32 columns and halves h (rows g + 8·h), a unit has

    all         [lane][block][h] u32   four bits of columns 8t … 8t+7: column 2i at bits 4i, 2i + 1
                                       at 16 + 4i
    int4        [g][h] fp16, or bf16   the scale of a row's 64 columns
                [g][h] u8              its zero point
    int4-symmetric
                [g][h] bf16            2^129 times the scale of a row's 64 columns; values are 8
                                       less than their bits
    int4-g32    [g][block][h] the same scales
                [g][h] u8              zero points, that of the first block in the low nibble
    q5_k, q5_1  [lane] u32             fifth bits: of column 2i at bit i + 4h + 8·block, of column
                                       2i + 1 at 16 more
    q4_1, q5_1  [g][block][h] fp16     scales, then [g][block][h] fp16 minima: [g][2][block][h]
    q4_k, q5_k  [g][h][2] fp16         scale and minimum of a row's 256 columns
                [g][h][2][block] u8    the multiples of them in each block
    q6_k        [lane][block] u32      two more bits: of column 2i at bits 2i + 8h, of column 2i + 1
                                       at 16 more
                [g][h][4] u8           128 + the multiples of the scale for 16 columns each
                [g][h] fp16            the scale of a row's 256 columns
    k-mixed     as q6_k, then
                [g][h] fp16            the minimum of a row's 256 columns
                [g][h][block] u8       the multiples of it in each block

Rows of Q4_K and Q5_K in one weight with Q6_K's are stored as k-mixed, with the same numbers.
Columns that pad the last unit have values of zero, or numbers that are never multiplied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.code_units import (
    UNIT_COLUMNS,
    by_row,
    exact,
    from_lanes,
    joined_bytes,
    lane_octets,
    scale_type,
    split_bytes,
    spread,
    whole_units,
    within,
)
from specbuild.plugins_cuda.linear.codec import (
    BLOCK_MINIMUM,
    BLOCK_SCALE,
    MINIMUM,
    SCALE,
    ZERO,
    Codec,
    CodeForm,
    GroupedCodes,
)
from specbuild.plugins_cuda.linear.packing import BLOCK, HALF_ROWS, TILE_ROWS
from specbuild.plugins_cuda.linear.storage import (
    INT4,
    INT4_BF16,
    INT4_G32,
    INT4_G32_BF16,
    INT4_SYMMETRIC,
    K_MIXED,
    LOAD_BYTES,
    Q4_1,
    Q4_K,
    Q5_1,
    Q5_K,
    Q6_K,
    Storage,
)
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    import torch

_NIBBLE, _NIBBLE_BITS, _SIX_BITS = 15, 4, 6
# Four bits are multiples of 2^-129 in kernels, and scales times 2^129 are bf16 numbers.
_SYMMETRIC_MIDDLE, _SYMMETRIC_UNIT = 8, 2.0**129
_SYMMETRIC_LIMIT, _SMALL_SYMMETRIC = 0.5, 2.0**-120
# Numbers of eight columns that are packed together, so that they stay in a CPU's cache.
_CACHED_OCTETS = 1 << 15
_SIX_BIT_COLUMNS, _SIX_BIT_MIDDLE, _MULTIPLE_BIAS = 16, 32, 128


def nibble_words(codes: torch.Tensor) -> torch.Tensor:
    """Convert four bits of u8 values [N, complete units] to int32 [tile, unit, g, t, block, h]."""
    return _bit_words(codes, _NIBBLE_BITS)


def _bit_words(codes: torch.Tensor, step: int) -> torch.Tensor:
    """Pack u8 values of up to ``step`` bits: column 2i at bits step · i, column 2i + 1 at 16 more.

    Eight columns are packed at once, within a number of 64 bits.
    """
    import torch

    octets = lane_octets(codes)
    words = torch.empty(octets.shape, dtype=torch.int32, device=octets.device)
    for some, packed in zip(
        octets.view(-1).split(_CACHED_OCTETS), words.view(-1).split(_CACHED_OCTETS), strict=True
    ):
        packed.copy_(_every_second(some, step) | _every_second(some >> 8, step) << 16)
    return words


def _every_second(octets: torch.Tensor, step: int) -> torch.Tensor:
    """Move bytes 0, 2, 4 and 6 to bits 0, step, 2 · step and 3 · step."""
    columns = octets & 0x00FF00FF00FF00FF
    moved = columns.clone()
    for i in (1, 2, 3):
        moved |= columns >> i * (16 - step)
    return moved & 0xFFFF


def _word_bits(words: torch.Tensor, step: int, bits: int, first: torch.Tensor) -> torch.Tensor:
    """Invert it: return values of ``bits`` bits [..., 8], from bit ``first`` of the word on."""
    import torch

    shifts = first[..., None, None] + torch.arange(4, dtype=torch.int32)[:, None] * step
    shifts = shifts + torch.tensor([0, 16], dtype=torch.int32)
    return (words[..., None, None] >> shifts & (1 << bits) - 1).flatten(-2)


def lane_words(raw: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return the bytes of lanes as int32 [tile, unit, g, t, …]."""
    import torch

    return raw.view(torch.int32).unflatten(-1, (HALF_ROWS, 4, *shape))


def nibbles(raw: torch.Tensor) -> torch.Tensor:
    """Convert bytes [tile, unit, 512] to lanes [tile, unit, g, t, block, h, 8]."""
    import torch

    words = lane_words(raw, 2, 2)
    return _word_bits(words, _NIBBLE_BITS, _NIBBLE_BITS, torch.zeros((), dtype=torch.int32))


def _halves(raw: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return bytes as fp16 [tile, unit, g, …]."""
    import torch

    return raw.view(torch.float16).unflatten(-1, (HALF_ROWS, *shape))


def _few_bits(form: CodeForm, bits: int) -> bool:
    return form.code_type == "int" and form.bits <= bits and form.block[0] == 1


def _int4_codec(columns: int, storage: Storage, scale_dtype: str) -> Codec:
    of_unit = UNIT_COLUMNS // columns

    def pack(weight: GroupedCodes) -> torch.Tensor:
        import torch

        zeros = _zero_points(weight.numbers(ZERO))
        codes = whole_units(weight.codes.to(torch.uint8), zeros[:, -1:])
        scales = exact(weight.numbers(SCALE), scale_type(scale_dtype))
        scales = by_row(scales, of_unit).transpose(-1, -2)
        points = by_row(zeros, of_unit)
        if of_unit == 2:
            points = points[..., 0] | points[..., 1] << _NIBBLE_BITS
        return joined_bytes(nibble_words(codes), scales, points, size=storage.elements)

    def values(packed: torch.Tensor) -> torch.Tensor:
        import torch

        words, scales, points = split_bytes(packed, LOAD_BYTES, 2 * TILE_ROWS * of_unit, TILE_ROWS)
        zeros = points.unflatten(-1, (HALF_ROWS, 2, 1))
        if of_unit == 2:
            zeros = torch.cat((zeros & _NIBBLE, zeros >> _NIBBLE_BITS), dim=-1)
        codes = from_lanes(nibbles(words)).float() - spread(zeros, columns)
        halves = scales.view(scale_type(scale_dtype)).unflatten(-1, (HALF_ROWS, of_unit, 2))
        return codes * spread(halves.transpose(-1, -2), columns)

    def takes(form: CodeForm) -> bool:
        fits = _few_bits(form, _NIBBLE_BITS) and not form.has_minima
        return fits and form.scale_dtype == scale_dtype

    return Codec({SCALE: columns, ZERO: columns}, _NIBBLE_BITS, takes, pack, values)


def _pack_symmetric(weight: GroupedCodes) -> torch.Tensor:
    import torch

    numbers = weight.numbers(SCALE)
    wrong = numbers[~((numbers == 0) | within(numbers, _SMALL_SYMMETRIC, _SYMMETRIC_LIMIT))]
    if len(wrong):
        raise SpecbuildError(
            f"an int4 weight has a scale of {float(wrong[0]):g}, expected 0 or less than "
            f"{_SYMMETRIC_LIMIT:g}, which kernels decode; build with --weights-dtype bf16"
        )
    codes = (whole_units(weight.codes) + _SYMMETRIC_MIDDLE).to(torch.uint8)
    scales = exact(numbers, torch.bfloat16).double() * _SYMMETRIC_UNIT
    parts = by_row(scales.to(torch.bfloat16), 1)
    return joined_bytes(nibble_words(codes), parts, size=INT4_SYMMETRIC.unit_bytes)


def _read_symmetric(packed: torch.Tensor) -> torch.Tensor:
    import torch

    words, parts = split_bytes(packed, LOAD_BYTES, 2 * TILE_ROWS)
    scales = parts.view(torch.bfloat16).unflatten(-1, (HALF_ROWS, 2, 1)).double()
    codes = from_lanes(nibbles(words)).float() - _SYMMETRIC_MIDDLE
    return codes * spread(scales / _SYMMETRIC_UNIT, UNIT_COLUMNS)


def _takes_symmetric(form: CodeForm) -> bool:
    is_signed = not form.has_minima and not form.has_zero_points
    return _few_bits(form, _NIBBLE_BITS) and is_signed and form.scale_dtype == "BF16"


def _zero_points(numbers: torch.Tensor) -> torch.Tensor:
    """Convert zero points to u8; SpecbuildError if one has more than four bits.

    A difference of five bits times a scale is exact in kernels, and units with two groups store
    four bits.
    """
    import torch

    wrong = numbers[(numbers < 0) | (numbers > _NIBBLE)]
    if len(wrong):
        raise SpecbuildError(
            f"a quantized weight has a zero point of {float(wrong[0]):g}, expected 0 to {_NIBBLE}, "
            "which kernels decode; build with --weights-dtype bf16"
        )
    return numbers.to(torch.uint8)


def _minimum_codec(bits: int, storage: Storage) -> Codec:
    """Return the codec of Q4_1, or of Q5_1 with a fifth bit."""

    def pack(weight: GroupedCodes) -> torch.Tensor:
        import torch

        parts = [by_row(exact(weight.numbers(name), torch.float16), 2) for name in (SCALE, MINIMUM)]
        both = torch.stack(parts, dim=3).transpose(-1, -2)  # [tile, unit, g, part, block, h]
        return joined_bytes(*_few_words(weight, bits), both, size=storage.elements)

    def values(packed: torch.Tensor) -> torch.Tensor:
        words, fifth, parts = split_bytes(packed, LOAD_BYTES, _fifth_bytes(bits), TILE_ROWS * 8)
        both = _halves(parts, 2, 2, 2).transpose(-1, -2)
        scales, minima = (spread(both[:, :, :, i], BLOCK) for i in (0, 1))
        return _few_values(words, fifth) * scales + minima

    def takes(form: CodeForm) -> bool:
        return _few_bits(form, bits) and form.has_minima and form.scale_dtype == "F16"

    return Codec({SCALE: BLOCK, MINIMUM: BLOCK}, bits, takes, pack, values)


def _few_words(weight: GroupedCodes, bits: int) -> list[torch.Tensor]:
    """Return the words of values of four bits; with five, also those of the fifth bits."""
    import torch

    codes = whole_units(weight.codes).to(torch.uint8)
    words = [nibble_words(codes & _NIBBLE)]
    if bits > _NIBBLE_BITS:
        fifth = _bit_words(codes >> _NIBBLE_BITS, 1)
        words.append((fifth << _fifth_places()).sum((-1, -2), dtype=torch.int32))
    return words


def _few_values(words: torch.Tensor, fifth: torch.Tensor) -> torch.Tensor:
    """Invert it, for bytes [tile, unit, …], empty where there are no fifth bits: fp32 [N, K]."""
    lanes = nibbles(words)
    if fifth.numel():
        high = lane_words(fifth)[..., None, None].expand(*lanes.shape[:-1])
        lanes = lanes | _word_bits(high, 1, 1, _fifth_places()) << _NIBBLE_BITS
    return from_lanes(lanes).float()


def _fifth_bytes(bits: int) -> int:
    return LOAD_BYTES // 4 * (bits > _NIBBLE_BITS)


def _k_codec(bits: int, storage: Storage) -> Codec:
    """Return the codec of Q4_K, or of Q5_K with a fifth bit."""

    def pack(weight: GroupedCodes) -> torch.Tensor:
        import torch

        blocks = [
            by_row(exact(weight.numbers(n), torch.float16), 1) for n in (BLOCK_SCALE, BLOCK_MINIMUM)
        ]
        groups = [by_row(weight.numbers(n).to(torch.uint8), 2) for n in (SCALE, MINIMUM)]
        return joined_bytes(
            *_few_words(weight, bits),
            torch.cat(blocks, dim=-1),
            torch.stack(groups, dim=-2),
            size=storage.elements,
        )

    def values(packed: torch.Tensor) -> torch.Tensor:
        words, fifth, blocks, groups = split_bytes(
            packed, LOAD_BYTES, _fifth_bytes(bits), 4 * TILE_ROWS, 4 * TILE_ROWS
        )
        of_blocks = _halves(blocks, 2, 2)
        of_groups = groups.unflatten(-1, (HALF_ROWS, 2, 2, 2))
        scale, minimum = (
            spread(of_blocks[..., i, None], UNIT_COLUMNS) * spread(of_groups[..., i, :], BLOCK)
            for i in (0, 1)
        )
        return _few_values(words, fifth) * scale + minimum

    def takes(form: CodeForm) -> bool:
        return form.has_factors and form.has_minima and form.bits == bits

    parts = {SCALE: BLOCK, MINIMUM: BLOCK, BLOCK_SCALE: UNIT_COLUMNS, BLOCK_MINIMUM: UNIT_COLUMNS}
    return Codec(parts, bits, takes, pack, values)


def _fifth_places() -> torch.Tensor:
    """Return the first fifth bit of a lane's words, int32 [block, h]."""
    import torch

    return torch.tensor([[0, 4], [8, 12]], dtype=torch.int32)


def _six_bit_codec(storage: Storage) -> Codec:
    """Return the codec of Q6_K, or of Q6_K together with other K-quants."""
    has_minima = storage is K_MIXED

    def pack(weight: GroupedCodes) -> torch.Tensor:
        import torch

        codes = (whole_units(weight.codes) + _SIX_BIT_MIDDLE).to(torch.uint8)
        high = _bit_words(codes >> _NIBBLE_BITS, 2)
        high = high[..., 0] | high[..., 1] << 8
        groups = by_row((weight.numbers(SCALE) + _MULTIPLE_BIAS).to(torch.uint8), 4)
        scales = [by_row(exact(weight.numbers(BLOCK_SCALE), torch.float16), 1)]
        if has_minima:
            scales.append(by_row(exact(weight.numbers(BLOCK_MINIMUM), torch.float16), 1))
            scales.append(by_row(weight.numbers(MINIMUM).to(torch.uint8), 2))
        words = nibble_words(codes & _NIBBLE)
        return joined_bytes(words, high, groups, *scales, size=storage.elements)

    def values(packed: torch.Tensor) -> torch.Tensor:
        import torch

        words, more, groups, blocks, minima, multiples = split_bytes(
            packed, LOAD_BYTES, LOAD_BYTES // 2, 4 * TILE_ROWS, 2 * TILE_ROWS,
            *(2 * (2 * TILE_ROWS * has_minima,)),
        )  # fmt: skip
        high = lane_words(more, 2)[..., None].expand(-1, -1, -1, -1, -1, 2)
        codes = nibbles(words) | _word_bits(high, 2, 2, torch.tensor([0, 8])) << _NIBBLE_BITS
        scale = spread(groups.unflatten(-1, (HALF_ROWS, 2, 4)), _SIX_BIT_COLUMNS) - _MULTIPLE_BIAS
        scale = scale * spread(_halves(blocks, 2, 1), UNIT_COLUMNS)
        values_of_codes = (from_lanes(codes).float() - _SIX_BIT_MIDDLE) * scale
        if has_minima:
            parts = spread(multiples.unflatten(-1, (HALF_ROWS, 2, 2)), BLOCK)
            values_of_codes = values_of_codes + parts * spread(_halves(minima, 2, 1), UNIT_COLUMNS)
        return values_of_codes

    def takes(form: CodeForm) -> bool:
        fits = form.code_type == "int" and form.bits <= _SIX_BITS
        return fits and form.has_factors and form.has_minima <= has_minima

    parts = {SCALE: _SIX_BIT_COLUMNS, BLOCK_SCALE: UNIT_COLUMNS}
    if has_minima:
        parts |= {MINIMUM: BLOCK, BLOCK_MINIMUM: UNIT_COLUMNS}
    return Codec(parts, _SIX_BITS, takes, pack, values)


NIBBLE_CODECS = {
    INT4_SYMMETRIC: Codec(
        {SCALE: UNIT_COLUMNS}, _NIBBLE_BITS, _takes_symmetric, _pack_symmetric, _read_symmetric
    ),
    INT4: _int4_codec(UNIT_COLUMNS, INT4, "F16"),
    INT4_G32: _int4_codec(BLOCK, INT4_G32, "F16"),
    INT4_BF16: _int4_codec(UNIT_COLUMNS, INT4_BF16, "BF16"),
    INT4_G32_BF16: _int4_codec(BLOCK, INT4_G32_BF16, "BF16"),
    Q4_1: _minimum_codec(4, Q4_1),
    Q5_1: _minimum_codec(5, Q5_1),
    Q4_K: _k_codec(4, Q4_K),
    Q5_K: _k_codec(5, Q5_K),
    Q6_K: _six_bit_codec(Q6_K),
    # After the storages that it can replace.
    K_MIXED: _six_bit_codec(K_MIXED),
}
