"""Units of quantized checkpoints in the layout of kernels: words by lane, then numbers of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.packing import BLOCK, HALF_ROWS, TILE_ROWS
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    import torch

UNIT_COLUMNS = 2 * BLOCK


def exact(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert numbers to another type exactly; SpecbuildError if one is not representable."""
    stored = scales.to(dtype)
    wrong = scales[stored.float() != scales]
    if len(wrong):
        name = str(dtype).removeprefix("torch.")
        raise SpecbuildError(
            f"a quantized weight has a scale of {float(wrong[0]):g}, expected a {name} number as "
            "in the checkpoint; build with --weights-dtype bf16"
        )
    return stored


def within(scales: torch.Tensor, least: float, limit: float) -> torch.Tensor:
    """Return which scales have an absolute value from ``least`` to less than ``limit``."""
    return (scales.abs() >= least) & (scales.abs() < limit)


def scale_type(name: str) -> torch.dtype:
    """Return the type of scales with this safetensors name."""
    import torch

    return {"F16": torch.float16, "BF16": torch.bfloat16}[name]


def whole_units(codes: torch.Tensor, fill: torch.Tensor | None = None) -> torch.Tensor:
    """Pad values [N, K] with columns of ``fill`` [N, 1], or zeros, to complete units."""
    import torch

    missing = -codes.shape[1] % UNIT_COLUMNS
    if not missing:
        return codes
    last = codes.new_zeros(codes.shape[0], 1) if fill is None else fill
    return torch.cat([codes, last.expand(-1, missing)], dim=1)


def by_lane(codes: torch.Tensor) -> torch.Tensor:
    """Convert values [N, columns of complete units] to [tile, unit, g, t, block, h, 8]."""
    parts = codes.reshape(-1, 2, HALF_ROWS, codes.shape[1] // UNIT_COLUMNS, 2, 4, 8)
    return parts.permute(0, 3, 2, 5, 4, 1, 6)


def lane_octets(codes: torch.Tensor) -> torch.Tensor:
    """Return the eight columns of each lane as one number, int64 [tile, unit, g, t, block, h].

    ``codes`` are u8 [N, columns of complete units]; the first column is the lowest byte.
    """
    import torch

    octets = codes.contiguous().view(torch.int64)
    parts = octets.reshape(-1, 2, HALF_ROWS, codes.shape[1] // UNIT_COLUMNS, 2, 4)
    return parts.permute(0, 3, 2, 5, 4, 1).contiguous()


def from_lanes(lanes: torch.Tensor) -> torch.Tensor:
    """Invert :func:`by_lane`."""
    tiles, units = lanes.shape[:2]
    return lanes.permute(0, 5, 2, 1, 4, 3, 6).reshape(tiles * TILE_ROWS, units * UNIT_COLUMNS)


def by_row(numbers: torch.Tensor, of_unit: int) -> torch.Tensor:
    """Convert numbers [N, units · of_unit] to [tile, unit, g, h, of_unit]."""
    units = numbers.shape[1] // of_unit
    return numbers.reshape(-1, 2, HALF_ROWS, units, of_unit).permute(0, 3, 2, 1, 4)


def from_rows(parts: torch.Tensor) -> torch.Tensor:
    """Invert :func:`by_row`."""
    return parts.permute(0, 3, 2, 1, 4).reshape(parts.shape[0] * TILE_ROWS, -1)


def spread(parts: torch.Tensor, columns: int) -> torch.Tensor:
    """Repeat numbers [tile, unit, g, h, n] over ``columns`` columns each: [N, K]."""
    return from_rows(parts).float().repeat_interleave(columns, dim=1)


def joined_bytes(*parts: torch.Tensor, size: int) -> torch.Tensor:
    """Concatenate parts [tile, unit, …] as bytes, u8 [tile, unit, size]."""
    import torch

    flat = [part.flatten(2).contiguous().view(torch.uint8) for part in parts]
    padding = size - sum(part.shape[2] for part in flat)
    if padding:
        flat.append(flat[0].new_zeros(1, 1, 1).expand(*flat[0].shape[:2], padding))
    return torch.cat(flat, dim=2)


def split_bytes(packed: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
    """Invert it: return the bytes [tile, unit, size] of each part; further bytes are ignored."""
    rest = packed.shape[2] - sum(sizes)
    parts = packed.split([*sizes, rest] if rest else list(sizes), dim=2)
    return [part.contiguous() for part in parts[: len(sizes)]]
