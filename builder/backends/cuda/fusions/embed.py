"""Replaces the target's embedding by Embed."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.builder.backends.cuda.fusions.fused_node import ROWS, as_bf16, place, static
from specbuild.builder.backends.cuda.fusions.matching import constant_factor, only_user
from specbuild.builder.graph.passes.rewriting import take_place
from specbuild.builder.graph.passes.weights import recipe_of


def fuse_embed(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace ``Gather(table, token_ids)``, optionally times a constant."""
    if node.op_type != "Gather" or recipe_of(node.inputs[0]) is None:
        return False
    inputs = {"token_ids": node.inputs[1], "table": as_bf16(node.inputs[0])}
    factor = constant_factor(mul := only_user(node.outputs[0], "Mul"))
    last, scale = (node, 1.0) if mul is None or factor is None else (mul, factor)
    (x,) = place(last, "Embed", inputs, [(ROWS, static(node.inputs[0], 1))], scale=scale)
    take_place(last.outputs[0], x, graph)
    return True
