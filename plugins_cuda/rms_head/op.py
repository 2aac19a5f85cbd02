"""RmsHead: the logits of selected rows: final norm and head."""

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
    divisor: float = 1.0,
    cap: float = 0.0,
    vocab_size: int = 0,
) -> torch.Tensor:
    """Return logits fp32 [R, V] of ``x`` [T, K] at ``logit_rows`` [R]; ``weight`` is a packed [V,
    K].

    ``vocab_size`` gives V if it is not 0; further rows of ``weight`` are padding. Logits are the
    fp32 sums / ``divisor``. Unlike activations they are not rounded, so that ties are rare. With
    ``cap`` they are ``cap · tanh(logit / cap)``.
    """
    normed = rms_norm(x[logit_rows.long()], norm, eps, rounding)
    rows = unpack_rows(decoded(weight, x.shape[1]))[: vocab_size or None]
    logits = normed.float() @ rows.float().T / divisor
    return cap * (logits / cap).tanh() if cap else logits


# The attributes of every op with a head.
HEAD_ATTRIBUTES = (
    AttributeSpec("eps", float),
    AttributeSpec("rounding", str),
    AttributeSpec("divisor", float, 1.0),
    AttributeSpec("cap", float, 0.0),
    AttributeSpec("vocab_size", int, 0),
)


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
    attributes=HEAD_ATTRIBUTES,
    reference=reference,
    lower=lower,
    tactics=tactics,
    traffic=Weights(multiplied=("weight",), part="head"),
)
