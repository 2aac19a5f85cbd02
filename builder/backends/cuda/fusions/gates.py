"""Replaces products with the sigmoid of a projection by SigmoidGate."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch.nn import functional as F

from specbuild.builder.backends.cuda.fusions.fused_node import ROWS, packed, place, static, stem
from specbuild.builder.backends.cuda.fusions.matching import (
    layout_origin,
    linear_of,
    origin,
    sigmoid_gate,
)
from specbuild.builder.graph.passes.rewriting import take_place
from specbuild.plugins_cuda.linear.packing import TILE_ROWS, pack_rows


def fuse_gate(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace ``attention · sigmoid(gate(x))``, and ``sigmoid(gate(x)) · down(h)``.

    In the second form a row has one gate value, and ``h`` is gated instead. The projection ``down``
    can then also add its output to that of the routed experts.
    """
    sides = sigmoid_gate(node)
    if sides is None:
        return False
    value, gate = sides
    if static(gate.inputs[1], 0) == 1:
        return _gate_rows(graph, node, linear_of(value), gate)
    attended = layout_origin(value)
    if attended is None or attended.producer() is None:
        return False
    width = static(gate.inputs[1], 0)
    inputs = {"x": attended, "gate": gate.outputs[0]}
    (y,) = place(node, "SigmoidGate", inputs, [(ROWS, width)])
    take_place(node.outputs[0], y, graph)
    return True


def _gate_rows(graph: ir.Graph, node: ir.Node, down: ir.Node | None, gate: ir.Node) -> bool:
    if down is None:
        return False
    weight = packed(graph, f"{stem(gate.inputs[1])}.packed", [gate.inputs[1]], _padded_to_tile)
    sizes = [(ROWS, TILE_ROWS)]
    (gate_value,) = place(down, "Linear", {"x": origin(gate.inputs[0]), "weight": weight}, sizes)
    inner = static(down.inputs[1], 1)
    inputs = {"x": layout_origin(down.inputs[0]), "gate": gate_value}
    (h,) = place(down, "SigmoidGate", inputs, [(ROWS, inner)], per_row=1)
    down.replace_input_with(0, h)
    take_place(node.outputs[0], down.outputs[0], graph)
    return True


def _padded_to_tile(weight: torch.Tensor) -> torch.Tensor:
    """Pad the single row of a projection with zeros to a tile."""
    return pack_rows(F.pad(weight, (0, 0, 0, TILE_ROWS - len(weight))))
