"""Embed: the rows of the embedding table that the tokens name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.embed.lowering import lower
from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import Weights

if TYPE_CHECKING:
    import torch


def reference(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``table`` [V, H] at ``token_ids`` [T] → [T, H]."""
    return table[token_ids.long()]


OP = OpSpec(
    name="Embed",
    doc="The embedding of each token.",
    inputs=(
        TensorSpec("token_ids", "int32", ("T",)),
        TensorSpec("table", "W", ("V", "H")),
    ),
    outputs=(TensorSpec("x", "T", ("T", "H")),),
    attributes=(),
    reference=reference,
    lower=lower,
    traffic=Weights(looked_up=("table",)),
)
