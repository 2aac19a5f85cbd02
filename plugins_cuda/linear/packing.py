"""The packed form of a dense weight: tiles of 16 rows × 32 columns in the layout of tensor cores.

``[N/16, K/32, 512]``: for each half h (rows 8h … 8h+7) and each lane = 4·g + t, a tile holds the
eight values of row g + 8h at columns 8t … 8t+7. A warp that loads 16 bytes per lane reads half a
tile, 512 contiguous bytes, and has the A operand of two ``mma.m16n8k16``: the first uses values 0–3
of each lane, the second values 4–7. The B operand of lane (g, t) is then 16 contiguous bytes of
token g. An mma may sum over its k in any order that A and B share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    import torch

TILE_ROWS, BLOCK, TILE_VALUES = 16, 32, 512
HALF_ROWS = TILE_ROWS // 2
_LANE_VALUES = 8


def packed_shape(rows: int, columns: int) -> tuple[int, int, int]:
    """Return the shape of a packed weight [rows, columns]; SpecbuildError for incomplete tiles."""
    if rows % TILE_ROWS or columns % BLOCK:
        raise SpecbuildError(
            f"a weight of {rows} x {columns} cannot be packed: expected rows in a multiple of "
            f"{TILE_ROWS} and columns in a multiple of {BLOCK}; build for the cpu backend"
        )
    return rows // TILE_ROWS, columns // BLOCK, TILE_VALUES


def whole_tiles(rows: torch.Tensor) -> torch.Tensor:
    """Pad ``rows`` [N, ...] with zeros to a multiple of a tile's rows."""
    missing = -len(rows) % TILE_ROWS
    if not missing:
        return rows
    import torch

    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def pack_rows(weight: torch.Tensor) -> torch.Tensor:
    """Pack ``weight`` [N, K] to [N/16, K/32, 512], with rows in order."""
    tiles, blocks, _ = packed_shape(*weight.shape)
    parts = weight.reshape(tiles, 2, HALF_ROWS, blocks, BLOCK // _LANE_VALUES, _LANE_VALUES)
    return parts.permute(0, 3, 1, 2, 4, 5).reshape(tiles, blocks, TILE_VALUES)


def unpack_rows(packed: torch.Tensor) -> torch.Tensor:
    """Invert :func:`pack_rows`."""
    tiles, blocks, _ = packed.shape
    parts = packed.reshape(tiles, blocks, 2, HALF_ROWS, BLOCK // _LANE_VALUES, _LANE_VALUES)
    return parts.permute(0, 2, 3, 1, 4, 5).reshape(tiles * TILE_ROWS, blocks * BLOCK)
