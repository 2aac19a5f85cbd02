"""Treats a dense feed-forward next to routed experts as shared experts, which every row uses."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.fusions.fused_node import static, stored
from specbuild.builder.backends.cuda.fusions.matching import (
    Norm,
    bias_of,
    linear_of,
    norm_of,
    origin_node,
    sigmoid_gate,
)
from specbuild.builder.graph.passes.rewriting import attribute
from specbuild.builder.graph.passes.weights import recipe_of
from specbuild.plugins_cuda.rms_moe.choice import MAX_BESIDE_SHARED, MAX_SHARED

# The indices of weights and scales of experts among the inputs of Moe.
_GATE_UP, _GATE_UP_SCALES, _DOWN = 2, 3, 5


@dataclass(frozen=True)
class SharedExperts:
    """``count`` experts of one SwiGLU: ``gate`` and ``up`` [count·I, H], ``down`` [H, count·I].

    With ``row_gate`` [1, H], a single expert is multiplied by the sigmoid of its output.
    """

    gate: ir.Value
    up: ir.Value
    down: ir.Value
    count: int
    row_gate: ir.Value | None = None


def shared_experts_of(
    shared_output: ir.Value | None, moe: ir.Node, norm: Norm
) -> SharedExperts | None:
    """Return the shared experts of a layer if they have the form of routed ones and the same input.

    Returns None without shared experts, with another activation or biases, if their inner width is
    not a multiple of the routed one, if there are too many routed ones, or if the checkpoint stores
    those in MXFP4 or in another quantized type: joined weights need a common storage.
    """
    gated = sigmoid_gate(origin_node(shared_output, "Mul"))
    row_gate = None if gated is None else gated[1]
    down = linear_of(shared_output if gated is None else gated[0])
    read = None if down is None else _swiglu_of(down)
    if down is None or read is None or attribute(moe, "activation", "") != "swiglu":
        return None
    readers = read if row_gate is None else (*read, row_gate)
    if any(norm_of(gemm.inputs[0]) != norm for gemm in readers):
        return None
    biased = any(bias_of(gemm) is not None for gemm in (*readers, down))
    experts, inner = (static(moe.inputs[_DOWN], axis) for axis in (0, 1))
    if biased or moe.inputs[_GATE_UP_SCALES] is not None or experts > MAX_BESIDE_SHARED:
        return None
    first, second, third, *of_rows = (gemm.inputs[1] for gemm in (*read, down, *readers[2:]))
    count, remainder = divmod(static(first, 0), inner)
    max_count = MAX_SHARED if row_gate is None else 1
    if remainder or not 1 <= count <= max_count or any(static(gate, 0) != 1 for gate in of_rows):
        return None
    of_routed = [_quantized_types(moe.inputs[index]) for index in (_GATE_UP, _DOWN)]
    if [_quantized_types(first, second), _quantized_types(third)] != of_routed:
        return None
    assert first is not None and second is not None and third is not None
    return SharedExperts(first, second, third, count, of_rows[0] if of_rows else None)


def _quantized_types(*weights: ir.Value | None) -> set[str | None]:
    """Return the quantized types of weights, or of the experts in them; None for other weights."""
    recipes = [recipe_of(stored(weight)) for weight in weights]
    singles = [
        one for recipe in recipes if recipe is not None for one in recipe.experts or (recipe,)
    ]
    return {None if one.quantized is None else one.quantized.form.name for one in singles}


def _swiglu_of(down: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """Return the projections of gate and up whose SwiGLU ``down`` reads, or None."""
    mul = origin_node(down.inputs[0], "Mul")
    if mul is None:
        return None
    silu, up = origin_node(mul.inputs[0], "Mul"), linear_of(mul.inputs[1])
    gate = None if silu is None else linear_of(silu.inputs[0])
    sigmoid = None if silu is None else origin_node(silu.inputs[1], "Sigmoid")
    if gate is None or up is None or sigmoid is None or linear_of(sigmoid.inputs[0]) is not gate:
        return None
    return gate, up


def as_gate_up(gate: torch.Tensor, up: torch.Tensor, count: int) -> torch.Tensor:
    """Convert both [count·I, H] to Moe's layout [count, H, 2·I], gate and up alternating."""
    pairs = torch.stack([gate, up], dim=1).unflatten(0, (count, -1))
    return pairs.flatten(1, 2).transpose(1, 2)


def as_down(down: torch.Tensor, count: int) -> torch.Tensor:
    """Convert ``down`` [H, count·I] to Moe's layout [count, I, H]."""
    return down.T.unflatten(0, (count, -1))
