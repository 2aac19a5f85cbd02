"""SigmoidGate: rows times the sigmoid of a gate, by value or one of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.sigmoid_gate.lowering import lower
from specbuild.plugins_cuda.traffic import NoTraffic

if TYPE_CHECKING:
    import torch


def reference(x: torch.Tensor, gate: torch.Tensor, *, per_row: int) -> torch.Tensor:
    """``x · σ(gate)`` [T, N]; the sigmoid is rounded to the type of ``x``, as transformers does.

    ``gate`` [T, N]; with ``per_row`` [T, G], of which the first value gates all of a row.
    """
    factor = gate[:, :1] if per_row else gate
    return x * factor.float().sigmoid().to(x.dtype)


OP = OpSpec(
    name="SigmoidGate",
    doc="y = x times the sigmoid of a gate, of each value or of a row.",
    inputs=(TensorSpec("x", "T", ("T", "N")), TensorSpec("gate", "T", ("T", "G"))),
    outputs=(TensorSpec("y", "T", ("T", "N")),),
    attributes=(AttributeSpec("per_row", int, 0),),
    reference=reference,
    lower=lower,
    traffic=NoTraffic("reads activations, which stay in the L2 cache"),
)
