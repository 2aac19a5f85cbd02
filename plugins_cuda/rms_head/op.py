"""RmsHead: the logits of chosen rows: final norm and vocabulary projection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.block_scaled import decoded
from specbuild.plugins_cuda.linear.op import PACKED_AXES
from specbuild.plugins_cuda.linear.packing import unpack_rows
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.rms_head.lowering import lower, tactics
from specbuild.plugins_cuda.rms_norms import rms_norm
from specbuild.plugins_cuda.traffic import Weights

if TYPE_CHECKING:
    import torch


def reference(
    x: torch.Tensor,
    logit_rows: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    rounding: str,
) -> torch.Tensor:
    """Logits fp32 [R, V] of ``x`` [T, K] at ``logit_rows`` [R]; ``weight`` is a packed [V, K].

    They are the fp32 sums: unlike activations they are not rounded, so that few are equal.
    """
    normed = rms_norm(x[logit_rows.long()], norm, eps, rounding)
    return normed.float() @ unpack_rows(decoded(weight, x.shape[1])).float().T


OP = OpSpec(
    name="RmsHead",
    doc="fp32 logits of the rows that logit_rows names: RMSNorm and vocabulary projection.",
    inputs=(
        TensorSpec("x", "T", ("T", "K")),
        TensorSpec("logit_rows", "int32", ("R",)),
        TensorSpec("norm", "W", ("K",)),
        TensorSpec("weight", "W", PACKED_AXES),
    ),
    outputs=(TensorSpec("logits", "float32", ("R", "vocab")),),
    attributes=(AttributeSpec("eps", float), AttributeSpec("rounding", str)),
    reference=reference,
    lower=lower,
    tactics=tactics,
    traffic=Weights(multiplied=("weight",), part="head"),
)
