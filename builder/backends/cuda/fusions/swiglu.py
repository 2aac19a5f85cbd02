"""Norm, gate and up projections and activation become RmsSwiglu."""

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
    linear_of,
    made_by,
    norm_of,
)
from specbuild.builder.graph.passes.rewriting import take_place
from specbuild.plugins_cuda.rms_swiglu.packing import join_gate_up


def fuse_swiglu(graph: ir.Graph, node: ir.Node) -> bool:
    """Rewrites ``silu(norm(x) · gate) · (norm(x) · up)``."""
    if node.op_type != "Mul":
        return False
    silu, up = made_by(node.inputs[0], "Mul"), linear_of(node.inputs[1])
    if silu is None or up is None:
        return False
    gate, sigmoid = linear_of(silu.inputs[0]), made_by(silu.inputs[1], "Sigmoid")
    if gate is None or sigmoid is None or linear_of(sigmoid.inputs[0]) is not gate:
        return False
    norm = norm_of(gate.inputs[0])
    if norm is None or norm_of(up.inputs[0]) != norm:
        return False
    biases = [bias_of(gate), bias_of(up)]
    if (biases[0] is None) != (biases[1] is None):
        return False
    weights = [gate.inputs[1], up.inputs[1]]
    name = stem(weights[0]).removesuffix("gate_proj")
    inputs = {
        "x": norm.x,
        "norm": as_bf16(norm.weight),
        "gate_up": packed_rows(graph, f"{name}gate_up_proj.packed", weights, join_gate_up),
    }
    if biases[0] is not None:
        inputs["bias"] = packed(graph, f"{name}gate_up_proj.packed_bias", biases, join_gate_up)
    (h,) = place(
        node,
        "RmsSwiglu",
        inputs,
        [(ROWS, static(weights[0], 0))],
        eps=norm.eps,
        rounding=norm.rounding,
    )
    take_place(node.outputs[0], h, graph)
    return True
