"""LinearPartial: a rank's part of a projection whose columns are split over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.block_scaled import decoded
from specbuild.plugins_cuda.linear.op import PACKED_AXES
from specbuild.plugins_cuda.linear.packing import unpack_rows
from specbuild.plugins_cuda.linear_partial.lowering import lower, tactics
from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import Weights

if TYPE_CHECKING:
    import torch


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x · Wᵀ`` [T, N] in fp32, not rounded: x [T, K], packed ``weight`` of [N, K]."""
    return x.float() @ unpack_rows(decoded(weight, x.shape[1])).float().T


OP = OpSpec(
    name="LinearPartial",
    doc="The fp32 partial sums x · Wᵀ of a rank's columns, W packed by pack_rows.",
    inputs=(TensorSpec("x", "T", ("T", "K")), TensorSpec("weight", "W", PACKED_AXES)),
    outputs=(TensorSpec("partial", "float32", ("T", "rows")),),
    attributes=(),
    reference=reference,
    lower=lower,
    tactics=tactics,
    traffic=Weights(multiplied=("weight",)),
)
