"""SigmoidGate: multiply rows by the sigmoid of a gate, per value or per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.sigmoid_gate.lowering import lower
from specbuild.plugins_cuda.traffic import NoTraffic

if TYPE_CHECKING:
    import torch


def reference(x: torch.Tensor, gate: torch.Tensor, *, per_row: int) -> torch.Tensor:
    """Return ``x · σ(gate)`` [T, N]; the sigmoid is rounded to the type of ``x``, as in
    transformers.

    ``gate`` is [T, N]; with ``per_row`` it is [T, G], and its first value applies to the row.
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
