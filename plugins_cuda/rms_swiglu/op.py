"""RmsSwiglu: norm, gate and up projections and their activation: the first half of an MLP.

The norm is optional, for models that normalize the output of an MLP instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.block_scaled import decoded
from specbuild.plugins_cuda.linear.op import PACKED_AXES
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.rms_norms import rms_norm
from specbuild.plugins_cuda.rms_swiglu.lowering import lower, tactics
from specbuild.plugins_cuda.rms_swiglu.packing import unpack_gate_up, unpack_gate_up_bias
from specbuild.plugins_cuda.rms_swiglu.prefill import GEGLU, SWIGLU
from specbuild.plugins_cuda.traffic import Weights

if TYPE_CHECKING:
    import torch


def reference(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    gate_up: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    eps: float,
    rounding: str = "llama",
    activation: str = SWIGLU,
) -> torch.Tensor:
    """Return ``silu(n · Gᵀ) · (n · Uᵀ)`` [T, I], where n is ``x`` [T, K] after the norm.

    ``rounding`` is that of the norm; without ``norm`` n is ``x``. The ``activation`` ``geglu_tanh``
    replaces SiLU by GELU, approximated by tanh. ``gate_up`` is packed by ``pack_gate_up``, the
    ``bias`` [2I] of both is joined by ``join_gate_up``. Gate, up, the activation and the product
    are each rounded.
    """
    from torch.nn.functional import gelu

    normed = (x if norm is None else rms_norm(x, norm, eps, rounding)).float()
    gate, up = (normed @ part.float().T for part in unpack_gate_up(decoded(gate_up, x.shape[1])))
    if bias is not None:
        gate_bias, up_bias = unpack_gate_up_bias(bias)
        gate, up = gate + gate_bias.float(), up + up_bias.float()
    gate = gate.to(x.dtype).float()
    activated = gelu(gate, approximate="tanh") if activation == GEGLU else gate * gate.sigmoid()
    return (activated.to(x.dtype).float() * up.to(x.dtype).float()).to(x.dtype)


OP = OpSpec(
    name="RmsSwiglu",
    doc="h = silu(rms(x) · Gᵀ) · (rms(x) · Uᵀ), gate and up packed together, biases too.",
    inputs=(
        TensorSpec("x", "T", ("T", "K")),
        TensorSpec("norm", "W", ("K",), optional=True),
        TensorSpec("gate_up", "W", PACKED_AXES),
        TensorSpec("bias", "W", ("N",), optional=True),
    ),
    outputs=(TensorSpec("h", "T", ("T", "inner")),),
    attributes=(
        AttributeSpec("eps", float),
        AttributeSpec("rounding", str, "llama"),
        AttributeSpec("activation", str, SWIGLU),
    ),
    reference=reference,
    lower=lower,
    tactics=tactics,
    traffic=Weights(multiplied=("gate_up",)),
)
