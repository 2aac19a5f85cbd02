"""Embed: the rows of the embedding table for the tokens, times a constant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.embed.lowering import lower
from specbuild.plugins_cuda.linear.block_scaled import decoded
from specbuild.plugins_cuda.linear.code_units import UNIT_COLUMNS
from specbuild.plugins_cuda.linear.packing import BLOCK, HALF_ROWS, TILE_ROWS
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import Weights

if TYPE_CHECKING:
    import torch


def table_rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return rows ``ids`` [T] of a ``table`` [V, H] in row order, packed or quantized: [T, H]."""

    ids = ids.long()
    if table.ndim == 2:
        return table[ids]
    tiles = table[ids // TILE_ROWS]
    if not table.dtype.is_floating_point:
        tiles = decoded(tiles, UNIT_COLUMNS * table.shape[1])
    tiles = tiles.unflatten(2, (2, HALF_ROWS, BLOCK))
    half, row = ids % TILE_ROWS // HALF_ROWS, ids % HALF_ROWS
    return tiles[range(len(ids)), :, half, row].flatten(1)


def reference(token_ids: torch.Tensor, table: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """Return rows ``token_ids`` [T] of ``table`` [V, H] (in row order, packed or quantized): [T,
    H].

    Values are multiplied by ``scale`` in fp32 and rounded.
    """
    rows = table_rows(table, token_ids)
    return rows if scale == 1 else (rows.float() * scale).to(rows.dtype)


OP = OpSpec(
    name="Embed",
    doc="The embedding of each token, times a constant.",
    inputs=(
        TensorSpec("token_ids", "int32", ("T",)),
        TensorSpec("table", "W", rank_free=True),
    ),
    outputs=(TensorSpec("x", "T", ("T", "H")),),
    attributes=(AttributeSpec("scale", float, 1.0),),
    reference=reference,
    lower=lower,
    traffic=Weights(looked_up=("table",)),
)
