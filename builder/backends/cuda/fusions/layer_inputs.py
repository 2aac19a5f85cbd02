"""Embeddings of each layer: their norm becomes DraftInput, and each layer's part a SigmoidGate.

All layers' parts stand side by side in one row [L·W]: one lookup, one projection and one launch of
norms serve all layers.
"""

from __future__ import annotations

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.fusions.fused_node import (
    ROWS,
    as_bf16,
    packed,
    place,
    static,
    stem,
)
from specbuild.builder.backends.cuda.fusions.matching import (
    constant_factor,
    layout_origin,
    linear_of,
    norm_of,
    only_user,
    origin_node,
)
from specbuild.builder.graph.passes.rewriting import (
    attribute,
    constant_array,
    producer,
    take_place,
)
from specbuild.plugins_cuda.sigmoid_gate.lowering import GELU


def fuse_layer_norms(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace ``(norm(projected) + own) · factor`` of rows [T, L, W], normed part by part."""
    if node.op_type != "Add" or node.outputs[0].shape is None or len(node.outputs[0].shape) != 3:
        return False
    norm, factor = (
        norm_of(node.inputs[0]),
        constant_factor(mul := only_user(node.outputs[0], "Mul")),
    )
    own, projected = layout_origin(node.inputs[1]), None if norm is None else layout_origin(norm.x)
    if norm is None or mul is None or factor is None or own is None or projected is None:
        return False
    layers, width = (static(node.outputs[0], axis) for axis in (1, 2))
    name = stem(norm.weight)

    def constant(weight: torch.Tensor) -> torch.Tensor:
        return torch.full((1,), factor, dtype=torch.bfloat16, device=weight.device)

    inputs = {
        "hidden": projected,
        "hidden_norm": packed(
            graph, f"{name}.of_all_layers", [as_bf16(norm.weight)], lambda w: w.repeat(layers)
        ),
        "residual": own,
        # Rounded: what reads the rows norms its results again, so that no factor matters.
        "factor": packed(graph, f"{name}.factor", [norm.weight], constant),
    }
    (rows,) = place(
        mul,
        "DraftInput",
        inputs,
        [(ROWS, layers * width)],
        eps=norm.eps,
        segments=layers,
        rounding=norm.rounding,
    )
    take_place(mul.outputs[0], rows, graph)
    return True


def fuse_layer_gate(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace ``gelu(gate(x)) · rows[:, layer]``, where :func:`fuse_layer_norms` made the rows."""
    gelu = origin_node(node.inputs[0], "Gelu") if node.op_type == "Mul" else None
    gate = None if gelu is None else linear_of(gelu.inputs[0])
    gather = None if gelu is None else producer(node.inputs[1], "Gather")
    rows = None if gather is None else producer(gather.inputs[0], "DraftInput")
    if gelu is None or gate is None or gather is None or rows is None:
        return False
    layer, width = constant_array(gather.inputs[1]), static(gate.inputs[1], 0)
    by_tanh = attribute(gelu, "approximate", "none") == "tanh"
    if layer is None or layer.ndim or attribute(gather, "axis", 0) != 1 or not by_tanh:
        return False
    inputs = {"x": rows.outputs[0], "gate": gate.outputs[0]}
    attributes = {"activation": GELU, "column": int(layer) * width}
    (y,) = place(node, "SigmoidGate", inputs, [(ROWS, width)], **attributes)
    take_place(node.outputs[0], y, graph)
    return True
