"""Products with the sigmoid of a projection become SigmoidGate: of attention, of shared experts."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch.nn import functional as F

from specbuild.builder.backends.cuda.fusions.fused_node import ROWS, packed, place, static, stem
from specbuild.builder.backends.cuda.fusions.matching import laid_out, linear_of, made_by, origin
from specbuild.builder.graph.passes.rewriting import take_place
from specbuild.plugins_cuda.linear.packing import TILE_ROWS, pack_rows


def fuse_gate(graph: ir.Graph, node: ir.Node) -> bool:
    """Rewrites ``attention · sigmoid(gate(x))``, and ``sigmoid(gate(x)) · down(h)`` of one value.

    The latter gates ``h``, since the projection that follows adds to the routed experts.
    """
    found = None if node.op_type != "Mul" else _sides(node)
    if found is None:
        return False
    value, gate = found
    if static(gate.inputs[1], 0) == 1:
        return _gate_rows(graph, node, linear_of(value), gate)
    attended = laid_out(value)
    if attended is None or attended.producer() is None:
        return False
    width = static(gate.inputs[1], 0)
    inputs = {"x": attended, "gate": gate.outputs[0]}
    (y,) = place(node, "SigmoidGate", inputs, [(ROWS, width)])
    take_place(node.outputs[0], y, graph)
    return True


def _sides(node: ir.Node) -> tuple[ir.Value, ir.Node] | None:
    """What is gated and the projection that gates it; None for a SiLU and everything else."""
    for value, other in (node.inputs, node.inputs[::-1]):
        sigmoid = made_by(other, "Sigmoid")
        gate = None if sigmoid is None else linear_of(sigmoid.inputs[0])
        if gate is not None and value is not None and linear_of(value) is not gate:
            return value, gate
    return None


def _gate_rows(graph: ir.Graph, node: ir.Node, down: ir.Node | None, gate: ir.Node) -> bool:
    if down is None:
        return False
    weight = packed(graph, f"{stem(gate.inputs[1])}.packed", [gate.inputs[1]], _whole_tile)
    sized = [(ROWS, TILE_ROWS)]
    (by,) = place(down, "Linear", {"x": origin(gate.inputs[0]), "weight": weight}, sized)
    inner = static(down.inputs[1], 1)
    inputs = {"x": laid_out(down.inputs[0]), "gate": by}
    (h,) = place(down, "SigmoidGate", inputs, [(ROWS, inner)], per_row=1)
    down.replace_input_with(0, h)
    take_place(node.outputs[0], down.outputs[0], graph)
    return True


def _whole_tile(weight: torch.Tensor) -> torch.Tensor:
    """One row of a projection, with zeros up to a tile's."""
    return pack_rows(F.pad(weight, (0, 0, 0, TILE_ROWS - len(weight))))
