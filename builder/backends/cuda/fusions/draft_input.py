"""The draft's normed embedding and hidden state, side by side, become DraftInput."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.builder.backends.cuda.fusions.fused_node import ROWS, as_bf16, place, static
from specbuild.builder.backends.cuda.fusions.matching import Norm, made_by, norm_of, read_norm
from specbuild.builder.graph.passes.rewriting import take_place
from specbuild.builder.graph.passes.weights import recipe_of


def fuse_draft_input(graph: ir.Graph, node: ir.Node) -> bool:
    """Rewrites ``Concat(norm(embedding of the token), norm(hidden))``."""
    if node.op_type != "Concat" or len(node.inputs) != 2:
        return False
    embed_norm, hidden_norm = map(norm_of, node.inputs)
    if embed_norm is None or hidden_norm is None:
        return False
    gather = made_by(embed_norm.x, "Gather")
    if gather is None or recipe_of(gather.inputs[0]) is None:
        return False
    if embed_norm.eps != hidden_norm.eps:
        raise AssertionError("the draft's two input norms have one eps")
    inputs = {
        "token_ids": gather.inputs[1],
        "table": as_bf16(gather.inputs[0]),
        "embed_norm": as_bf16(embed_norm.weight),
    }
    width = static(embed_norm.weight, 0) + static(hidden_norm.weight, 0)
    _place(graph, node, inputs, hidden_norm, width)
    return True


def fuse_lone_norm(graph: ir.Graph, node: ir.Node) -> bool:
    """A norm that nothing else took in is a DraftInput without an embedding.

    A draft without an embedding half has one in front of its projections; ``norm_output`` and
    ``norm_before_residual`` hand a normed state on; ``norm_before_fc`` norms what is fused, in a
    graph without tokens.
    """
    if node.op_type != "RMSNormalization":
        return False
    norm = read_norm(node)
    tokens = next((value for value in graph.inputs if value.name == "token_ids"), None)
    _place(graph, node, {"token_ids": tokens}, norm, static(norm.weight, 0))
    return True


def _place(
    graph: ir.Graph, node: ir.Node, inputs: dict[str, ir.Value | None], norm: Norm, width: int
) -> None:
    inputs = inputs | {"hidden": norm.x, "hidden_norm": as_bf16(norm.weight)}
    (u,) = place(node, "DraftInput", inputs, [(ROWS, width)], eps=norm.eps)
    take_place(node.outputs[0], u, graph)
