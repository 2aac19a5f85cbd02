"""Replaces the remaining projections by Linear, including a residual addition."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.builder.backends.cuda.fusions.fused_node import (
    ROWS,
    as_bf16,
    packed_rows,
    place,
    static,
    stem,
)
from specbuild.builder.backends.cuda.fusions.matching import (
    bias_of,
    constant_factor,
    layout_origin,
    only_user,
    origin,
)
from specbuild.builder.graph.passes.rewriting import take_place


def fuse_linear(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace ``Gemm(x, weight, bias?)`` or ``residual + factor · Gemm(…)``."""
    if node.op_type != "Gemm":
        return False
    weight = node.inputs[1]
    product, scale = node.outputs[0], 1.0
    factor = constant_factor(mul := only_user(product, "Mul"))
    if mul is not None and factor is not None:
        product, scale = mul.outputs[0], factor
    add = only_user(product, "Add")
    residual = None
    if add is not None:
        residual = next(value for value in add.inputs if value is not product)
    inputs = {
        # Heads are contiguous within a row, so the head axis is part of K.
        "x": layout_origin(node.inputs[0]),
        "weight": packed_rows(graph, f"{stem(weight)}.packed", [weight], lambda rows: rows),
        "bias": as_bf16(bias_of(node)),
        "residual": origin(residual),
    }
    last = product.producer() if add is None else add
    assert last is not None
    (y,) = place(last, "Linear", inputs, [(ROWS, static(weight, 0))], scale=scale)
    take_place(last.outputs[0], y, graph)
    return True
