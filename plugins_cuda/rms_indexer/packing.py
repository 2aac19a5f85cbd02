"""The packed projections of an indexer: its queries, its key, then its heads' weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.packing import TILE_ROWS, pack_rows, unpack_rows

if TYPE_CHECKING:
    import torch


def pack_indexer(
    q: torch.Tensor, k: torch.Tensor, head_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Pack projections [K, n_idx·d], [K, d] and [K, n_idx] to one weight [N/16, K/32, 512].

    The rows of the head weights are padded with zeros to complete tiles.
    """
    import torch

    rows = [q.T, k.T]
    if head_weights is not None:
        heads = head_weights.shape[1]
        rows += [head_weights.T, q.new_zeros(-heads % TILE_ROWS, q.shape[0])]
    return pack_rows(torch.cat(rows))


def unpack_indexer(packed: torch.Tensor, heads: int, width: int) -> tuple[torch.Tensor, ...]:
    """Return rows [n_idx·d, K], [d, K] and the remaining ones."""
    rows, queries = unpack_rows(packed), heads * width
    return rows[:queries], rows[queries : queries + width], rows[queries + width :]
