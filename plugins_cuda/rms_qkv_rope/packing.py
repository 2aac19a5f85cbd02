"""Packed Q, K and V projections: the two rows of a RoPE pair are in one tile.

The rows of all heads are in order: query heads, key heads, value heads. Within a head of width D,
packed tile j has rows 8j … 8j+7 in its first half and rows D/2+8j … D/2+8j+7 in its second. A lane
with row g of a tile therefore has the other row of the pair at g + 8.
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
    """Reorder ``rows`` [heads·D, ...]: row i of each head next to row i + D/2, tile by tile."""
    _require_width(head_dim)
    parts = rows.reshape(-1, 2, head_dim // TILE_ROWS, HALF_ROWS, *rows.shape[1:])
    return parts.transpose(1, 2).reshape(rows.shape)


def unpair_rows(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Invert :func:`pair_rows`."""
    _require_width(head_dim)
    parts = rows.reshape(-1, head_dim // TILE_ROWS, 2, HALF_ROWS, *rows.shape[1:])
    return parts.transpose(1, 2).reshape(rows.shape)


def join_qkv(*projections: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Join rows [heads·D, …] of queries, keys and values, or of keys and values, to [N, …].

    The result has the order of the packed rows.
    """
    import torch

    return pair_rows(torch.cat(projections), head_dim)


def pack_qkv(*projections: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Pack the same projections [heads·D, K] to one weight [N/16, K/32, 512]."""
    return pack_rows(join_qkv(*projections, head_dim=head_dim))


def unpack_qkv(packed: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the rows of q, k and v [N, K] of a weight of :func:`pack_qkv`."""
    return unpair_rows(unpack_rows(packed), head_dim)


def unpack_qkv_bias(bias: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the biases [N] of a result of :func:`join_qkv`."""
    return unpair_rows(bias, head_dim)


def _require_width(head_dim: int) -> None:
    if head_dim % TILE_ROWS:
        raise SpecbuildError(
            f"heads of width {head_dim} cannot be packed: expected a multiple of {TILE_ROWS}; "
            "build for the cpu backend"
        )
