"""Replaces the draft's normed embedding and hidden state by DraftInput.

Norms that no other fusion includes also become DraftInput, with their residual.
"""

from __future__ import annotations

from dataclasses import replace

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
    Norm,
    layout_origin,
    norm_of,
    only_user,
    origin,
    origin_node,
    read_norm,
)
from specbuild.builder.graph.passes.rewriting import attribute, constant_array, producer, take_place
from specbuild.builder.graph.passes.weights import recipe_of


def fuse_draft_input(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace ``Concat(norm(embedding of the token), norm(hidden))``."""
    if node.op_type != "Concat" or len(node.inputs) != 2:
        return False
    embed_norm, hidden_norm = map(norm_of, node.inputs)
    if embed_norm is None or hidden_norm is None:
        return False
    gather = origin_node(embed_norm.x, "Gather")
    if gather is None or recipe_of(gather.inputs[0]) is None:
        return False
    if (embed_norm.eps, embed_norm.rounding) != (hidden_norm.eps, hidden_norm.rounding):
        raise AssertionError("the draft's two input norms differ in eps or rounding")
    inputs = {
        "token_ids": gather.inputs[1],
        "table": as_bf16(gather.inputs[0]),
        "embed_norm": as_bf16(embed_norm.weight),
    }
    width = static(embed_norm.weight, 0) + static(hidden_norm.weight, 0)
    _place(graph, node, inputs, hidden_norm, width)
    return True


def fuse_state_norms(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace a ``Concat`` of the norms of all parts of one value, in order (``fc_norm``)."""
    if node.op_type != "Concat":
        return False
    norms = [norm_of(value) for value in node.inputs]
    parts = [norm for norm in norms if norm is not None]
    if not parts or len(parts) < len(norms):
        return False
    states = _value_of_parts([norm.x for norm in parts])
    if states is None:
        return False
    kinds = {(norm.eps, norm.rounding, static(norm.weight, 0)) for norm in parts}
    if len(kinds) != 1:
        raise AssertionError("the norms before fc differ in width, rounding or eps")
    weights = [norm.weight for norm in parts]
    name = stem(weights[0]).removesuffix(".0")
    joined = packed(graph, f"{name}.joined", weights, lambda *w: torch.cat(w))
    joined_norm = replace(parts[0], x=states, weight=joined)
    tokens = _tokens(graph)
    _place(graph, node, {"token_ids": tokens}, joined_norm, static(joined, 0), segments=len(parts))
    return True


def _value_of_parts(parts: list[ir.Value]) -> ir.Value | None:
    """Return the value [T, parts · W] whose columns are exactly ``parts`` [T, W], in order."""
    gathers = [producer(part, "Gather") for part in parts]
    first = gathers[0]
    if first is None or first.inputs[0] is None:
        return None
    for i, gather in enumerate(gathers):
        index = None if gather is None else constant_array(gather.inputs[1])
        if gather is None or index is None or gather.inputs[0] is not first.inputs[0]:
            return None
        if index.ndim or index != i or attribute(gather, "axis", 0) != 1:
            return None
    return layout_origin(first.inputs[0]) if static(first.inputs[0], 1) == len(parts) else None


def fuse_output_norm(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace ``residual + norm(u)``, and ``(residual + norm(u)) · factor`` with a weight [1].

    These are the output norms of attention and feed-forward.
    """
    if node.op_type != "Add":
        return False
    norms = [(value, norm_of(value)) for value in node.inputs]
    match = next(((value, norm) for value, norm in norms if norm is not None), None)
    if match is None:
        return False
    value, norm = match
    residual = next(other for other in node.inputs if other is not value)
    mul = only_user(node.outputs[0], "Mul")
    is_scaled = mul is not None and _is_factor(mul.inputs[1])
    inputs = {
        "residual": origin(residual),
        "factor": as_bf16(mul.inputs[1]) if mul is not None and is_scaled else None,
    }
    last = mul if mul is not None and is_scaled else node
    _place(graph, last, inputs, norm, static(norm.weight, 0))
    return True


def _is_factor(value: ir.Value | None) -> bool:
    """Return whether a value is a weight with one element."""
    while value is not None and recipe_of(value) is None:
        cast = producer(value, "Cast")
        value = None if cast is None else cast.inputs[0]
    recipe = recipe_of(value)
    return recipe is not None and recipe.shape == (1,)


def fuse_unfused_norm(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace a norm that no other fusion includes by a DraftInput without an embedding.

    Such norms are before the projections of a draft without an embedding half, on its output
    (``norm_output``, ``norm_before_residual``), and before ``fc`` in a graph without tokens
    (``norm_before_fc``).
    """
    if node.op_type != "RMSNormalization":
        return False
    norm = read_norm(node)
    # DraftInput rounds its output, so it also replaces the casts after an fp32 norm.
    casts = [user for user in node.outputs[0].consumers() if user.op_type == "Cast"]
    u = _place(graph, node, {"token_ids": _tokens(graph)}, norm, static(norm.weight, 0))
    if not norm.casts_first:
        for cast in casts:
            take_place(cast.outputs[0], u, graph)
    return True


def _tokens(graph: ir.Graph) -> ir.Value | None:
    return next((value for value in graph.inputs if value.name == "token_ids"), None)


def _place(  # noqa: PLR0917
    graph: ir.Graph,
    node: ir.Node,
    inputs: dict[str, ir.Value | None],
    norm: Norm,
    width: int,
    segments: int = 1,
) -> ir.Value:
    inputs = inputs | {"hidden": norm.x, "hidden_norm": as_bf16(norm.weight)}
    (u,) = place(
        node,
        "DraftInput",
        inputs,
        [(ROWS, width)],
        eps=norm.eps,
        segments=segments,
        rounding=norm.rounding,
    )
    take_place(node.outputs[0], u, graph)
    return u
