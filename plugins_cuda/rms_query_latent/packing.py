"""Packed query and latent projections: the query heads as in RmsQkvRope, then the latent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.packing import pack_rows, unpack_rows
from specbuild.plugins_cuda.rms_qkv_rope.packing import pair_rows, unpair_rows

if TYPE_CHECKING:
    import torch


def pack_query_latent(q: torch.Tensor, down: torch.Tensor, *, head_dim: int) -> torch.Tensor:
    """Pack projections [Hq·D, K] and [K, L] to one weight [(Hq·D + L)/16, K/32, 512]."""
    import torch

    return pack_rows(torch.cat([pair_rows(q, head_dim), down.T]))


def pack_query_bias(q: torch.Tensor, *, head_dim: int, latent: int) -> torch.Tensor:
    """Pack a bias [Hq·D] to [Hq·D + L] in the order of the packed rows; latents have none."""
    import torch

    return torch.cat([pair_rows(q, head_dim), q.new_zeros(latent)])


def unpack_query_latent(
    packed: torch.Tensor, head_dim: int, latent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows [Hq·D, K] and [L, K] of a weight of :func:`pack_query_latent`."""
    rows = unpack_rows(packed)
    return unpair_rows(rows[:-latent], head_dim), rows[-latent:]
