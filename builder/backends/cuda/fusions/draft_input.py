"""The draft's normed embedding and hidden state, side by side, become DraftInput.

So do norms that no other op takes in, with what they are added to.
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
    laid_out,
    made_by,
    norm_of,
    only_user,
    origin,
    read_norm,
)
from specbuild.builder.graph.passes.rewriting import attribute, constant_array, producer, take_place
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
    if (embed_norm.eps, embed_norm.rounding) != (hidden_norm.eps, hidden_norm.rounding):
        raise AssertionError("the draft's two input norms have one eps and rounding")
    inputs = {
        "token_ids": gather.inputs[1],
        "table": as_bf16(gather.inputs[0]),
        "embed_norm": as_bf16(embed_norm.weight),
    }
    width = static(embed_norm.weight, 0) + static(hidden_norm.weight, 0)
    _place(graph, node, inputs, hidden_norm, width)
    return True


def fuse_state_norms(graph: ir.Graph, node: ir.Node) -> bool:
    """Rewrites ``Concat`` of norms of all parts of one value in order (``fc_norm``)."""
    if node.op_type != "Concat":
        return False
    norms = [norm_of(value) for value in node.inputs]
    parts = [norm for norm in norms if norm is not None]
    if not parts or len(parts) < len(norms):
        return False
    states = _whole([norm.x for norm in parts])
    if states is None:
        return False
    kinds = {(norm.eps, norm.rounding, static(norm.weight, 0)) for norm in parts}
    if len(kinds) != 1:
        raise AssertionError("the norms of the states before fc are of one width, kind and eps")
    weights = [norm.weight for norm in parts]
    name = stem(weights[0]).removesuffix(".0")
    joined = packed(graph, f"{name}.joined", weights, lambda *w: torch.cat(w))
    whole = replace(parts[0], x=states, weight=joined)
    tokens = _tokens(graph)
    _place(graph, node, {"token_ids": tokens}, whole, static(joined, 0), segments=len(parts))
    return True


def _whole(parts: list[ir.Value]) -> ir.Value | None:
    """The value [T, parts · W] of which ``parts`` [T, W] are all columns, in order."""
    gathers = [producer(part, "Gather") for part in parts]
    first = gathers[0]
    if first is None or first.inputs[0] is None:
        return None
    for i, gather in enumerate(gathers):
        place = None if gather is None else constant_array(gather.inputs[1])
        if gather is None or place is None or gather.inputs[0] is not first.inputs[0]:
            return None
        if place.ndim or place != i or attribute(gather, "axis", 0) != 1:
            return None
    return laid_out(first.inputs[0]) if static(first.inputs[0], 1) == len(parts) else None


def fuse_output_norm(graph: ir.Graph, node: ir.Node) -> bool:
    """Rewrites ``residual + norm(u)``, and ``(residual + norm(u)) · factor`` by a weight [1].

    It stands where a model norms what attention or a feed-forward gives.
    """
    if node.op_type != "Add":
        return False
    norms = [(value, norm_of(value)) for value in node.inputs]
    found = next(((value, norm) for value, norm in norms if norm is not None), None)
    if found is None:
        return False
    value, norm = found
    residual = next(other for other in node.inputs if other is not value)
    mul = only_user(node.outputs[0], "Mul")
    scaled = mul is not None and _is_factor(mul.inputs[1])
    inputs = {
        "residual": origin(residual),
        "factor": as_bf16(mul.inputs[1]) if mul is not None and scaled else None,
    }
    last = mul if mul is not None and scaled else node
    _place(graph, last, inputs, norm, static(norm.weight, 0))
    return True


def _is_factor(value: ir.Value | None) -> bool:
    """Whether a value is a weight of one number."""
    while value is not None and recipe_of(value) is None:
        cast = producer(value, "Cast")
        value = None if cast is None else cast.inputs[0]
    recipe = recipe_of(value)
    return recipe is not None and recipe.shape == (1,)


def fuse_lone_norm(graph: ir.Graph, node: ir.Node) -> bool:
    """A norm that nothing else took in is a DraftInput without an embedding.

    A draft without an embedding half has one in front of its projections; ``norm_output`` and
    ``norm_before_residual`` hand a normed state on; ``norm_before_fc`` norms what is fused, in a
    graph without tokens.
    """
    if node.op_type != "RMSNormalization":
        return False
    norm = read_norm(node)
    # DraftInput rounds its output, so it also replaces the casts of a norm in fp32.
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
