"""A dense feed-forward beside routed experts, as experts of their form that every row has."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.fusions.fused_node import static
from specbuild.builder.backends.cuda.fusions.matching import (
    Norm,
    bias_of,
    linear_of,
    made_by,
    norm_of,
)
from specbuild.builder.graph.passes.rewriting import attribute
from specbuild.plugins_cuda.rms_moe.choice import MAX_SHARED

# Where Moe has the experts' weights and their scales.
_DOWN, _GATE_UP_SCALES = 5, 3


@dataclass(frozen=True)
class SharedExperts:
    """``count`` experts of one SwiGLU: ``gate`` and ``up`` [count·I, H], ``down`` [H, count·I]."""

    gate: ir.Value
    up: ir.Value
    down: ir.Value
    count: int


def shared_experts_of(beside: ir.Value | None, moe: ir.Node, norm: Norm) -> SharedExperts | None:
    """What is added to routed experts, where it is experts of their form over the same rows.

    None where nothing is, or where it has another activation, biases, or an inner width that is no
    multiple of theirs; and beside experts whose checkpoint has them in MXFP4.
    """
    down = linear_of(beside)
    mul = None if down is None else made_by(down.inputs[0], "Mul")
    if down is None or mul is None or attribute(moe, "activation", "") != "swiglu":
        return None
    silu, up = made_by(mul.inputs[0], "Mul"), linear_of(mul.inputs[1])
    gate = None if silu is None else linear_of(silu.inputs[0])
    sigmoid = None if silu is None else made_by(silu.inputs[1], "Sigmoid")
    if gate is None or up is None or sigmoid is None or linear_of(sigmoid.inputs[0]) is not gate:
        return None
    if norm_of(gate.inputs[0]) != norm or norm_of(up.inputs[0]) != norm:
        return None
    biased = any(bias_of(gemm) is not None for gemm in (gate, up, down))
    if biased or moe.inputs[_GATE_UP_SCALES] is not None:
        return None
    weights = [gemm.inputs[1] for gemm in (gate, up, down)]
    count, left = divmod(static(weights[0], 0), static(moe.inputs[_DOWN], 1))
    if left or not 1 <= count <= MAX_SHARED:
        return None
    first, second, third = weights
    assert first is not None and second is not None and third is not None
    return SharedExperts(first, second, third, count)


def as_gate_up(gate: torch.Tensor, up: torch.Tensor, count: int) -> torch.Tensor:
    """Both [count·I, H] as Moe has them: [count, H, 2·I], gate and up alternating."""
    pairs = torch.stack([gate, up], dim=1).unflatten(0, (count, -1))
    return pairs.flatten(1, 2).transpose(1, 2)


def as_down(down: torch.Tensor, count: int) -> torch.Tensor:
    """``down`` [H, count·I] as Moe has it: [count, I, H]."""
    return down.T.unflatten(0, (count, -1))
