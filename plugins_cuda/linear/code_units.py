"""Units of codes as kernels load them: words by lane, and numbers of rows behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.packing import BLOCK, HALF_ROWS, TILE_ROWS
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    import torch

UNIT_COLUMNS = 2 * BLOCK


def exact(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers in another type. SpecbuildError where one is none of it."""
    stored = scales.to(dtype)
    wrong = scales[stored.float() != scales]
    if len(wrong):
        name = str(dtype).removeprefix("torch.")
        raise SpecbuildError(
            f"a scale of a quantized weight is {float(wrong[0]):g}, expected a number of {name}, "
            "as the checkpoint says; build with --weights-dtype bf16"
        )
    return stored


def scale_type(name: str) -> torch.dtype:
    """A type of scales that safetensors calls so."""
    import torch

    return {"F16": torch.float16, "BF16": torch.bfloat16}[name]


def whole_units(codes: torch.Tensor, fill: torch.Tensor | None = None) -> torch.Tensor:
    """Codes [N, K] with columns of ``fill`` [N, 1], or zeros, to whole units."""
    import torch

    missing = -codes.shape[1] % UNIT_COLUMNS
    if not missing:
        return codes
    last = codes.new_zeros(codes.shape[0], 1) if fill is None else fill
    return torch.cat([codes, last.expand(-1, missing)], dim=1)


def by_lane(codes: torch.Tensor) -> torch.Tensor:
    """Codes [N, columns of whole units] → [tile, unit, g, t, block, h, 8]."""
    parts = codes.reshape(-1, 2, HALF_ROWS, codes.shape[1] // UNIT_COLUMNS, 2, 4, 8)
    return parts.permute(0, 3, 2, 5, 4, 1, 6)


def from_lanes(lanes: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`by_lane`."""
    tiles, units = lanes.shape[:2]
    return lanes.permute(0, 5, 2, 1, 4, 3, 6).reshape(tiles * TILE_ROWS, units * UNIT_COLUMNS)


def by_row(numbers: torch.Tensor, of_unit: int) -> torch.Tensor:
    """Numbers [N, units · of_unit] → [tile, unit, g, h, of_unit]."""
    units = numbers.shape[1] // of_unit
    return numbers.reshape(-1, 2, HALF_ROWS, units, of_unit).permute(0, 3, 2, 1, 4)


def from_rows(parts: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`by_row`."""
    return parts.permute(0, 3, 2, 1, 4).reshape(parts.shape[0] * TILE_ROWS, -1)


def spread(parts: torch.Tensor, columns: int) -> torch.Tensor:
    """Numbers [tile, unit, g, h, n], each of ``columns`` columns, as those of columns, [N, K]."""
    return from_rows(parts).float().repeat_interleave(columns, dim=1)


def joined_bytes(*parts: torch.Tensor, size: int) -> torch.Tensor:
    """Parts [tile, unit, …] as bytes one after the other, u8 [tile, unit, size]."""
    import torch
    from torch.nn import functional as F

    flat = torch.cat([part.flatten(2).contiguous().view(torch.uint8) for part in parts], dim=2)
    return F.pad(flat, (0, size - flat.shape[2]))


def split_bytes(packed: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
    """The inverse: the bytes [tile, unit, size] of each part; the last may be followed by more."""
    rest = packed.shape[2] - sum(sizes)
    parts = packed.split([*sizes, rest] if rest else list(sizes), dim=2)
    return [part.contiguous() for part in parts[: len(sizes)]]
