"""Replaces norm, gate and up projections and activation by RmsSwiglu."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.builder.backends.cuda.fusions.fused_node import (
    ROWS,
    as_bf16,
    packed,
    packed_rows,
    place,
    static,
    stem,
)
from specbuild.builder.backends.cuda.fusions.matching import (
    bias_of,
    layout_origin,
    linear_of,
    norm_of,
    origin_node,
)
from specbuild.builder.graph.passes.rewriting import attribute, take_place
from specbuild.plugins_cuda.rms_swiglu.packing import join_gate_up
from specbuild.plugins_cuda.rms_swiglu.prefill import GEGLU, SWIGLU


def fuse_swiglu(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace ``silu(norm(x) · gate) · (norm(x) · up)``, also with GELU or without the norm."""
    if node.op_type != "Mul":
        return False
    (gate, activation), up = _activated(node.inputs[0]), linear_of(node.inputs[1])
    if gate is None or up is None:
        return False
    norm, x = norm_of(gate.inputs[0]), layout_origin(gate.inputs[0])
    if norm_of(up.inputs[0]) != norm or (norm is None and layout_origin(up.inputs[0]) is not x):
        return False
    biases = [bias_of(gate), bias_of(up)]
    if (biases[0] is None) != (biases[1] is None):
        return False
    weights = [gate.inputs[1], up.inputs[1]]
    name = stem(weights[0]).removesuffix("gate_proj")
    normed = {"x": x} if norm is None else {"x": norm.x, "norm": as_bf16(norm.weight)}
    inputs: dict[str, ir.Value | None] = {
        **normed,
        "gate_up": packed_rows(graph, f"{name}gate_up_proj.packed", weights, join_gate_up),
    }
    if biases[0] is not None:
        inputs["bias"] = packed(graph, f"{name}gate_up_proj.packed_bias", biases, join_gate_up)
    (h,) = place(
        node,
        "RmsSwiglu",
        inputs,
        [(ROWS, static(weights[0], 0))],
        activation=activation,
        **({"eps": 0.0} if norm is None else {"eps": norm.eps, "rounding": norm.rounding}),
    )
    take_place(node.outputs[0], h, graph)
    return True


def _activated(value: ir.Value | None) -> tuple[ir.Node | None, str]:
    """Return the projection before a SiLU or tanh GELU, or None, and the activation's name."""
    gelu = origin_node(value, "Gelu")
    if gelu is not None:
        is_tanh = attribute(gelu, "approximate", "none") == "tanh"
        return (linear_of(gelu.inputs[0]) if is_tanh else None), GEGLU
    silu = origin_node(value, "Mul")
    gate = None if silu is None else linear_of(silu.inputs[0])
    sigmoid = None if silu is None else origin_node(silu.inputs[1], "Sigmoid")
    if sigmoid is None or linear_of(sigmoid.inputs[0]) is not gate:
        return None, SWIGLU
    return gate, SWIGLU
