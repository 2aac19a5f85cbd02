"""SigmoidGate: multiply rows by the sigmoid or GELU of a gate, per value or per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.sigmoid_gate.lowering import GELU, SIGMOID, lower
from specbuild.plugins_cuda.traffic import NoTraffic

if TYPE_CHECKING:
    import torch


def reference(
    x: torch.Tensor,
    gate: torch.Tensor,
    *,
    per_row: int,
    activation: str = SIGMOID,
    column: int = 0,
) -> torch.Tensor:
    """Return ``x · σ(gate)`` [T, N]; the sigmoid is rounded to the type of ``x``, as in
    transformers.

    ``gate`` is [T, N]; with ``per_row`` it is [T, G], and its first value applies to the row. With
    the ``activation`` ``gelu_tanh`` the factor is GELU by tanh. Without ``per_row`` only the N
    columns of ``x`` from ``column`` on are read.
    """
    from torch.nn.functional import gelu

    if activation not in (SIGMOID, GELU):
        raise ValueError(f"SigmoidGate: unknown activation {activation!r}")
    factor = gate[:, :1] if per_row else gate
    part = x if per_row else x[:, column : column + gate.shape[1]]
    wide = factor.float()
    activated = wide.sigmoid() if activation == SIGMOID else gelu(wide, approximate="tanh")
    return part * activated.to(x.dtype)


OP = OpSpec(
    name="SigmoidGate",
    doc="y = columns of x times the sigmoid or GELU of a gate, of each value or of a row.",
    inputs=(TensorSpec("x", "T", ("T", "X")), TensorSpec("gate", "T", ("T", "G"))),
    outputs=(TensorSpec("y", "T", ("T", "N")),),
    attributes=(
        AttributeSpec("per_row", int, 0),
        AttributeSpec("activation", str, SIGMOID),
        AttributeSpec("column", int, 0),
    ),
    reference=reference,
    lower=lower,
    traffic=NoTraffic("reads activations, which stay in the L2 cache"),
)
