"""The packed form of W_uk: tiles of a head's latent columns, in the order of lanes.

A warp processes 32 columns of a head's latent at a time. Lane 4g + t has columns 2t and 2t + 1 of
each of four products of 8 columns. In this order these are 8 adjacent columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.packing import pack_rows, unpack_rows

if TYPE_CHECKING:
    import torch

COLUMNS = 32
_PRODUCTS, _LANES, _PAIR = 4, 4, 2


def pack_absorbed(w_uk: torch.Tensor) -> torch.Tensor:
    """Pack ``W_uk`` [heads, nope, rank] to [heads·rank/16, nope/32, 512]."""
    heads, nope, rank = w_uk.shape
    # Row 8j + 2t + e of 32 is column 8t + 2j + e.
    columns = w_uk.transpose(1, 2).reshape(heads, rank // COLUMNS, _LANES, _PRODUCTS, _PAIR, nope)
    return pack_rows(columns.transpose(2, 3).reshape(heads * rank, nope))


def unpack_absorbed(packed: torch.Tensor, heads: int) -> torch.Tensor:
    """Invert :func:`pack_absorbed`."""
    rows = unpack_rows(packed)
    columns = rows.reshape(heads, -1, _PRODUCTS, _LANES, _PAIR, rows.shape[1])
    return columns.transpose(2, 3).reshape(heads, -1, rows.shape[1]).transpose(1, 2)
