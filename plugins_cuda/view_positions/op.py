"""ViewPositions: the positions of the pages of every layer's view (SpecPV)."""

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
    """Return the position of the first slot of each page in the first head's view, [layers, B, P].

    ``page_table`` [B, P] has each sequence's pages in the order of positions, ``view_tables``
    [layers, B, kv_heads, P] those that a layer attends to. A page of the pool's ``pages`` belongs
    to one sequence. Page 0 belongs to none and gets position 0.
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
