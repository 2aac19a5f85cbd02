"""Treats a dense feed-forward next to routed experts as shared experts, which every row uses."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.fusions.fused_node import static
from specbuild.builder.backends.cuda.fusions.matching import (
    Norm,
    bias_of,
    linear_of,
    norm_of,
    origin_node,
)
from specbuild.builder.graph.passes.rewriting import attribute
from specbuild.plugins_cuda.rms_moe.choice import MAX_SHARED

# The indices of weights and scales of experts among the inputs of Moe.
_DOWN, _GATE_UP_SCALES = 5, 3


@dataclass(frozen=True)
class SharedExperts:
    """``count`` experts of one SwiGLU: ``gate`` and ``up`` [count·I, H], ``down`` [H, count·I]."""

    gate: ir.Value
    up: ir.Value
    down: ir.Value
    count: int


def shared_experts_of(
    shared_output: ir.Value | None, moe: ir.Node, norm: Norm
) -> SharedExperts | None:
    """Return the shared experts of a layer if they have the form of routed ones and the same input.

    Returns None without shared experts, with another activation or biases, if their inner width is
    not a multiple of the routed one, or if the checkpoint has routed experts in MXFP4.
    """
    down = linear_of(shared_output)
    mul = None if down is None else origin_node(down.inputs[0], "Mul")
    if down is None or mul is None or attribute(moe, "activation", "") != "swiglu":
        return None
    silu, up = origin_node(mul.inputs[0], "Mul"), linear_of(mul.inputs[1])
    gate = None if silu is None else linear_of(silu.inputs[0])
    sigmoid = None if silu is None else origin_node(silu.inputs[1], "Sigmoid")
    if gate is None or up is None or sigmoid is None or linear_of(sigmoid.inputs[0]) is not gate:
        return None
    if norm_of(gate.inputs[0]) != norm or norm_of(up.inputs[0]) != norm:
        return None
    biased = any(bias_of(gemm) is not None for gemm in (gate, up, down))
    if biased or moe.inputs[_GATE_UP_SCALES] is not None:
        return None
    weights = [gemm.inputs[1] for gemm in (gate, up, down)]
    count, remainder = divmod(static(weights[0], 0), static(moe.inputs[_DOWN], 1))
    if remainder or not 1 <= count <= MAX_SHARED:
        return None
    first, second, third = weights
    assert first is not None and second is not None and third is not None
    return SharedExperts(first, second, third, count)


def as_gate_up(gate: torch.Tensor, up: torch.Tensor, count: int) -> torch.Tensor:
    """Convert both [count·I, H] to Moe's layout [count, H, 2·I], gate and up alternating."""
    pairs = torch.stack([gate, up], dim=1).unflatten(0, (count, -1))
    return pairs.flatten(1, 2).transpose(1, 2)


def as_down(down: torch.Tensor, count: int) -> torch.Tensor:
    """Convert ``down`` [H, count·I] to Moe's layout [count, I, H]."""
    return down.T.unflatten(0, (count, -1))
