"""Packed Q, K and V projections: the two rows that a rotation mixes stand in one tile.

The rows of all heads come in order: query heads, key heads, value heads. Within a head of width D,
packed tile j holds rows 8j … 8j+7 in its first half and rows D/2+8j … D/2+8j+7 in its second, so
that a lane which has row g of a tile has its partner of the rotation at g + 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.packing import (
    HALF_ROWS,
    TILE_ROWS,
    pack_rows,
    unpack_rows,
)
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    import torch


def pair_rows(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """``rows`` [heads·D, ...] with row i of each head next to row i + D/2, tile by tile."""
    _require_width(head_dim)
    parts = rows.reshape(-1, 2, head_dim // TILE_ROWS, HALF_ROWS, *rows.shape[1:])
    return parts.transpose(1, 2).reshape(rows.shape)


def unpair_rows(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The inverse of :func:`pair_rows`."""
    _require_width(head_dim)
    parts = rows.reshape(-1, head_dim // TILE_ROWS, 2, HALF_ROWS, *rows.shape[1:])
    return parts.transpose(1, 2).reshape(rows.shape)


def join_qkv(*projections: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows [heads·D, …] of queries, keys and values, or of the latter two → [N, …], in the order
    of the packed rows."""
    import torch

    return pair_rows(torch.cat(projections), head_dim)


def pack_qkv(*projections: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The same projections [heads·D, K] → one packed weight [N/16, K/32, 512]."""
    return pack_rows(join_qkv(*projections, head_dim=head_dim))


def unpack_qkv(packed: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The rows of q, k and v [N, K] that :func:`pack_qkv` was given, joined."""
    return unpair_rows(unpack_rows(packed), head_dim)


def unpack_qkv_bias(bias: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The biases [N] that :func:`join_qkv` was given, joined."""
    return unpair_rows(bias, head_dim)


def _require_width(head_dim: int) -> None:
    if head_dim % TILE_ROWS:
        raise SpecbuildError(
            f"heads of width {head_dim} cannot be packed: the width must be a multiple of "
            f"{TILE_ROWS}; build for the cpu backend"
        )
