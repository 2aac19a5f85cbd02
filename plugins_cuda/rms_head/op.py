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
    divisor: float = 1.0,
    cap: float = 0.0,
    vocab_size: int = 0,
) -> torch.Tensor:
    """Logits fp32 [R, V] of ``x`` [T, K] at ``logit_rows`` [R]; ``weight`` is a packed [V, K].

    With ``vocab_size`` V is that, and what ``weight`` has behind it stands for no token. Logits are
    the fp32 sums over ``divisor``: unlike activations they are not rounded, so that few are equal.
    With ``cap`` they are ``cap · tanh(logit / cap)``.
    """
    normed = rms_norm(x[logit_rows.long()], norm, eps, rounding)
    rows = unpack_rows(decoded(weight, x.shape[1]))[: vocab_size or None]
    logits = normed.float() @ rows.float().T / divisor
    return cap * (logits / cap).tanh() if cap else logits


# Of every op that reads a head.
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
