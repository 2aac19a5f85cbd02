"""Linear: a projection by a packed weight, with an optional bias and residual."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.block_scaled import decoded
from specbuild.plugins_cuda.linear.lowering import lower, tactics
from specbuild.plugins_cuda.linear.packing import unpack_rows
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import Weights

if TYPE_CHECKING:
    import torch

# Units of a tile's columns, and the elements of one: see ``storage.py``.
PACKED_AXES = ("tiles", "units", "elements")


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return ``residual + scale · (x · Wᵀ + bias)`` [T, N]: x [T, K], packed ``weight`` of [N, K].

    Sums are fp32. The addend of the residual is rounded to its type first, and again after a
    multiplication by ``scale``.
    """
    y = x.float() @ unpack_rows(decoded(weight, x.shape[1])).float().T
    if bias is not None:
        y = y + bias.float()
    y = y.to(x.dtype)
    if scale != 1:
        y = (y.float() * scale).to(x.dtype)
    return y if residual is None else (residual.float() + y.float()).to(x.dtype)


OP = OpSpec(
    name="Linear",
    doc="y = scale · (x · Wᵀ (+ bias)) (+ residual), W packed by pack_rows, perhaps quantised.",
    inputs=(
        TensorSpec("x", "T", ("T", "K")),
        TensorSpec("weight", "W", PACKED_AXES),
        TensorSpec("bias", "W", ("N",), optional=True),
        TensorSpec("residual", "T", ("T", "N"), optional=True),
    ),
    outputs=(TensorSpec("y", "T", ("T", "rows")),),
    attributes=(AttributeSpec("scale", float, 1.0),),
    reference=reference,
    lower=lower,
    tactics=tactics,
    traffic=Weights(multiplied=("weight",)),
)
