"""Capture: copy a layer's output to its columns of the aux hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.capture.lowering import lower
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import NoTraffic

if TYPE_CHECKING:
    import torch


def reference(x: torch.Tensor, captured: torch.Tensor, *, column: int) -> torch.Tensor:
    """Return ``captured`` [T, C] with ``x`` [T, H] in columns column·H … column·H + H − 1."""
    width = x.shape[1]
    out = captured.clone()
    out[:, column * width : (column + 1) * width] = x
    return out


OP = OpSpec(
    name="Capture",
    doc="x in the columns column·H and on of captured.",
    inputs=(
        TensorSpec("x", "T", ("T", "H")),
        TensorSpec("captured", "T", ("T", "C")),
    ),
    outputs=(TensorSpec("captured_out", "T", ("T", "C")),),
    attributes=(AttributeSpec("column", int),),
    aliases=(("captured_out", "captured"),),
    reference=reference,
    lower=lower,
    traffic=NoTraffic("copies rows of activations, which stay in the L2 cache"),
)
