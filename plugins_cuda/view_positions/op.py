"""ViewPositions: where the pages of every layer's view stand in their sequences (SpecPV)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import STATE_ONLY
from specbuild.plugins_cuda.view_positions.lowering import lower

if TYPE_CHECKING:
    import torch


def reference(
    page_table: torch.Tensor, view_tables: torch.Tensor, *, page_size: int, pages: int
) -> torch.Tensor:
    """[layers, B, P]: the position of the first slot of each page of a view's first head.

    ``page_table`` [B, P] has each sequence's pages in the order of their positions, ``view_tables``
    [layers, B, kv_heads, P] those that a layer sees; a page of the pool's ``pages`` is one
    sequence's. Page 0, which is nobody's, gets position 0.
    """
    import torch

    begins = page_table.new_zeros(pages)
    for table in page_table:
        begins[table.long()] = page_size * torch.arange(len(table), dtype=torch.int32)
    begins[0] = 0
    return begins[view_tables[:, :, 0].long()]


OP = OpSpec(
    name="ViewPositions",
    doc="The position of every page of the layers' views, for keys that rotate when read (SpecPV).",
    inputs=(
        TensorSpec("page_table", "int32", ("B", "P")),
        TensorSpec("view_tables", "int32", ("layers", "B", "kv_heads", "P")),
    ),
    outputs=(TensorSpec("page_position", "int32", ("layers", "B", "P")),),
    attributes=(AttributeSpec("page_size", int), AttributeSpec("pages", int)),
    reference=reference,
    lower=lower,
    traffic=STATE_ONLY,
)
