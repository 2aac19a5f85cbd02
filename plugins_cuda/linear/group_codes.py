"""Weights of quantized checkpoints in their own codes, in units as kernels decode them.

The value of a code is ``(code - zero point) * scale`` in fp32, rounded once to bf16: the weight
of an engine that dequantizes the checkpoint. Units are those of ``block_scaled.py``. A unit has,
for lane 4·g + t and halves h (rows g + 8·h),

    int4        [lane][block][h] u32   codes of columns 8t … 8t+7: column 2i at bits 4i, 2i + 1 at
                                       16 + 4i
                [g][h] fp16            the scale of a row's 64 columns
                [g][h] u8              its zero point
    int4 g32    [lane][block][h] u32   the same codes
                [g][block][h] fp16     scales
                [g][h] u8              zero points, that of the first block in the low nibble

Columns that fill the last unit have the code of zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.packing import BLOCK, HALF_ROWS, TILE_ROWS, TILE_VALUES
from specbuild.plugins_cuda.linear.storage import INT4, INT4_G32, LOAD_BYTES, Storage
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    import torch

UNIT_COLUMNS = 2 * BLOCK
_MOST_NIBBLE = 15
_NIBBLE_BITS = 4


@dataclass(frozen=True)
class GroupedCodes:
    """A weight [N, K] in codes: ``(code - zero point) * scale + minimum``.

    ``codes`` integers [N, K]. ``scales`` float32 [N, G], a scale for ``columns`` columns;
    ``zero_points`` integers and ``minima`` float32 have the same shape.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    columns: int
    zero_points: torch.Tensor | None = None
    minima: torch.Tensor | None = None

    def spread(self, parts: torch.Tensor, columns: int) -> torch.Tensor:
        """Numbers of groups [N, G] as those of runs of ``columns`` columns, of whole units."""
        import torch

        units = -(-self.codes.shape[1] // UNIT_COLUMNS)
        first = torch.arange(units * UNIT_COLUMNS // columns) * columns
        return parts[:, (first // self.columns).clamp_max(parts.shape[1] - 1)]


@dataclass(frozen=True)
class CodeForm:
    """What decides a weight's storage: the numbers that its codes are (``int``, ``e4m3`` …), their
    ``bits``, the (rows, columns) of a scale, whether blocks have minima, and the type of scales as
    safetensors spells it."""

    code_type: str
    bits: int
    block: tuple[int, int]
    has_minima: bool
    scale_dtype: str


def code_storage(form: CodeForm, columns: int) -> Storage | None:
    """The storage of a weight of ``columns`` columns with such codes, None where none has them."""
    for storage, codec in _CODECS.items():
        group = columns if form.block[1] >= columns else form.block[1]
        whole = group == columns or group % codec.columns == 0
        if whole and codec.takes(form):
            return storage
    return None


def grouped_for(weight: GroupedCodes, storage: Storage) -> GroupedCodes:
    """The weight with a scale for just the columns that share one in ``storage``."""
    columns = _CODECS[storage].columns
    return GroupedCodes(
        weight.codes,
        weight.spread(weight.scales, columns),
        columns,
        *(
            None if parts is None else weight.spread(parts, columns)
            for parts in (weight.zero_points, weight.minima)
        ),
    )


def pack_codes(weight: GroupedCodes, storage: Storage) -> torch.Tensor:
    """The packed form u8 [tiles, units, elements] of a weight in ``storage``.

    SpecbuildError where a scale is no fp16 number.
    """
    return _CODECS[storage].pack(weight)


def group_columns(storage: Storage) -> int:
    """Columns that share a scale in ``storage``; a group of a checkpoint may have more."""
    return _CODECS[storage].columns


def code_bits(storage: Storage) -> int:
    """Bits of a code in ``storage``."""
    return _CODECS[storage].bits


def decoded_codes(packed: torch.Tensor, columns: int, storage: Storage) -> torch.Tensor:
    """A packed weight as bf16 values [tiles, columns/32, 512], as ``packing.py`` places them."""
    import torch

    tiles = packed.shape[0]
    values = _CODECS[storage].values(packed)  # [N, whole units]
    rows = values.view(tiles, 2, HALF_ROWS, -1, BLOCK).permute(0, 3, 1, 2, 4)
    return rows.reshape(tiles, -1, TILE_VALUES)[:, : columns // BLOCK].to(torch.bfloat16)


@dataclass(frozen=True)
class _Codec:
    """How a storage is packed, and the fp32 values [N, columns of whole units] of what it packed.

    ``columns`` share a scale, and a code has ``bits`` bits. ``takes`` says of a form whether the
    storage has its numbers.
    """

    columns: int
    bits: int
    takes: Callable[[CodeForm], bool]
    pack: Callable[[GroupedCodes], torch.Tensor]
    values: Callable[[torch.Tensor], torch.Tensor]


def _int4_codec(columns: int) -> _Codec:
    of_unit = UNIT_COLUMNS // columns
    by_block = of_unit > 1

    def pack(weight: GroupedCodes) -> torch.Tensor:
        import torch

        assert weight.zero_points is not None and weight.minima is None
        zeros = weight.spread(weight.zero_points, columns).to(torch.uint8)
        codes = _padded(weight.codes.to(torch.uint8), zeros[:, -1:])
        words = _nibble_words(_by_lane(codes))
        scales = _lane_rows(_fp16(weight.spread(weight.scales, columns)), of_unit)
        points = _lane_rows(zeros, of_unit)
        if by_block:
            points = points[..., 0] | points[..., 1] << _NIBBLE_BITS
        return _joined(words, scales.transpose(-1, -2), points)

    def values(packed: torch.Tensor) -> torch.Tensor:
        import torch

        words, scales, points = _split(packed, LOAD_BYTES, TILE_ROWS * 2 * of_unit)
        rows = scales.view(torch.float16).unflatten(-1, (HALF_ROWS, of_unit, 2)).transpose(-1, -2)
        zeros = points.unflatten(-1, (HALF_ROWS, 2, 1))
        if by_block:
            zeros = torch.cat((zeros & _MOST_NIBBLE, zeros >> _NIBBLE_BITS), dim=-1)
        codes = _codes_of_words(words).float()
        zero, scale = (
            _from_lanes(part).float().repeat_interleave(columns, dim=1) for part in (zeros, rows)
        )
        return (codes - zero) * scale

    return _Codec(columns, _NIBBLE_BITS, _is_nibble, pack, values)


def _is_nibble(form: CodeForm) -> bool:
    few = form.code_type == "int" and form.bits <= _NIBBLE_BITS
    halves = form.scale_dtype in ("F16", "BF16")
    return few and halves and form.block[0] == 1 and not form.has_minima


def _fp16(scales: torch.Tensor) -> torch.Tensor:
    import torch

    stored = scales.to(torch.float16)
    wrong = scales[stored.float() != scales]
    if len(wrong):
        raise SpecbuildError(
            f"a scale of a quantized weight is {float(wrong[0]):g}, expected a number of fp16, "
            "which kernels decode; build with --weights-dtype bf16"
        )
    return stored


def _padded(codes: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] with columns of ``fill`` [N, 1] to whole units."""
    import torch

    missing = -codes.shape[1] % UNIT_COLUMNS
    return torch.cat([codes, fill.expand(-1, missing)], dim=1) if missing else codes


def _by_lane(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] → [tile, unit, g, t, block, h, 8]."""
    parts = codes.reshape(-1, 2, HALF_ROWS, codes.shape[1] // UNIT_COLUMNS, 2, 4, 8)
    return parts.permute(0, 3, 2, 5, 4, 1, 6)


def _nibble_words(lanes: torch.Tensor) -> torch.Tensor:
    """Eight codes of four bits → int32: even columns in the low half, odd ones in the high half."""
    import torch

    pairs = lanes.to(torch.int32).unflatten(-1, (4, 2))
    shifts = torch.arange(4, dtype=torch.int32) * _NIBBLE_BITS
    halves = (pairs << shifts[:, None]).sum(-2, dtype=torch.int32)
    return halves[..., 0] | halves[..., 1] << 16


def _codes_of_words(packed: torch.Tensor) -> torch.Tensor:
    """The inverse, of bytes [tile, unit, 512]: codes [N, columns of whole units]."""
    import torch

    tiles, units, _ = packed.shape
    words = packed.contiguous().view(torch.int32).view(tiles, units, HALF_ROWS, 4, 2, 2)
    shifts = torch.arange(4, dtype=torch.int32) * _NIBBLE_BITS
    halves = torch.stack((words & 0xFFFF, words >> 16 & 0xFFFF), dim=-1)
    codes = halves[..., None, :] >> shifts[:, None] & _MOST_NIBBLE  # […, block, h, 4, 2]
    ordered = codes.flatten(-2).permute(0, 5, 2, 1, 4, 3, 6)
    return ordered.reshape(tiles * TILE_ROWS, units * UNIT_COLUMNS)


def _lane_rows(parts: torch.Tensor, of_unit: int) -> torch.Tensor:
    """Numbers [N, units · of_unit] → [tile, unit, g, h, of_unit]."""
    return parts.reshape(-1, 2, HALF_ROWS, parts.shape[1] // of_unit, of_unit).permute(
        0, 3, 2, 1, 4
    )


def _from_lanes(parts: torch.Tensor) -> torch.Tensor:
    """[tile, unit, g, h, n] → [N, n·units]."""
    tiles = parts.shape[0]
    return parts.permute(0, 3, 2, 1, 4).reshape(tiles * TILE_ROWS, -1)


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    """Parts [tile, unit, …] as bytes one after the other."""
    import torch

    flat = [part.flatten(2).contiguous().view(torch.uint8) for part in parts]
    return torch.cat(flat, dim=2)


def _split(packed: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
    """The inverse: bytes [tile, unit, size] of each, the last takes the rest."""
    parts = packed.split([*sizes, packed.shape[2] - sum(sizes)], dim=2)
    return [part.contiguous() for part in parts]


_CODECS = {INT4: _int4_codec(UNIT_COLUMNS), INT4_G32: _int4_codec(BLOCK)}
GROUP_STORAGES = tuple(_CODECS)
