"""The target's embedding becomes Embed."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.builder.backends.cuda.fusions.fused_node import ROWS, as_bf16, place, static
from specbuild.builder.graph.passes.rewriting import take_place
from specbuild.builder.graph.passes.weights import recipe_of


def fuse_embed(graph: ir.Graph, node: ir.Node) -> bool:
    """Rewrites ``Gather(table, token_ids)``."""
    if node.op_type != "Gather" or recipe_of(node.inputs[0]) is None:
        return False
    inputs = {"token_ids": node.inputs[1], "table": as_bf16(node.inputs[0])}
    (x,) = place(node, "Embed", inputs, [(ROWS, static(node.inputs[0], 1))])
    take_place(node.outputs[0], x, graph)
    return True
