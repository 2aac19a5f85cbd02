"""ViewTables: the page tables that every layer's attention reads in a step (SpecPV)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import STATE_ONLY
from specbuild.plugins_cuda.view_tables.lowering import lower

if TYPE_CHECKING:
    import torch


def reference(
    page_table: torch.Tensor, partial_tables: torch.Tensor, viewed: torch.Tensor
) -> torch.Tensor:
    """Return [layers, B, kv_heads, P]: the partial table if ``viewed`` [B], else all pages.

    ``partial_tables`` [layers, BM, kv_heads, V] has the engine's maximum of sequences; its entries
    are padded with 0 to P, or truncated. ``page_table`` [B, P] is repeated.
    """
    layers, _, heads, entries = partial_tables.shape
    batch, pages = page_table.shape
    tables = page_table[None, :, None].expand(layers, -1, heads, -1).clone()
    partial = page_table.new_zeros(layers, batch, heads, pages)
    kept = min(pages, entries)
    partial[..., :kept] = partial_tables[:, :batch, :, :kept]
    chosen = viewed != 0
    tables[:, chosen] = partial[:, chosen]
    return tables


OP = OpSpec(
    name="ViewTables",
    doc="Every layer's page table per KV head: a partial one where a sequence is viewed (SpecPV).",
    inputs=(
        TensorSpec("page_table", "int32", ("B", "P")),
        TensorSpec("partial_tables", "int32", ("layers", "BM", "kv_heads", "entries")),
        TensorSpec("viewed", "int32", ("B",)),
    ),
    outputs=(TensorSpec("view_tables", "int32", ("layers", "B", "kv_heads", "P")),),
    attributes=(),
    reference=reference,
    lower=lower,
    traffic=STATE_ONLY,
)
