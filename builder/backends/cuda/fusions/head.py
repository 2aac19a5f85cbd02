"""The final norm, the choice of rows and the vocabulary projection become RmsHead."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from specbuild.builder.backends.cuda.fusions.fused_node import (
    LOGIT_ROWS,
    as_bf16,
    packed_rows,
    place,
    static,
    stem,
)
from specbuild.builder.backends.cuda.fusions.matching import (
    Norm,
    laid_out,
    made_by,
    norm_of,
    origin,
)
from specbuild.builder.graph.passes.rewriting import take_place
from specbuild.builder.graph.passes.weights import recipe_of


@dataclass(frozen=True)
class _ChosenRows:
    """Normed rows of ``x``: the norm works on a row alone, so rows may be chosen on either side."""

    x: ir.Value | None
    rows: ir.Value | None
    norm: Norm


def fuse_head(graph: ir.Graph, node: ir.Node) -> bool:
    """Rewrites the ``Gemm`` of chosen normed rows; its logits come in fp32."""
    if node.op_type != "Gemm":
        return False
    chosen = _chosen_rows(node.inputs[0])
    if chosen is None:
        return False
    norm, head = chosen.norm, node.inputs[1]
    inputs = {
        "x": chosen.x,
        "logit_rows": laid_out(chosen.rows),
        "norm": as_bf16(norm.weight),
        "weight": packed_rows(graph, f"{stem(head)}.packed", [head], lambda rows: rows),
    }
    sizes = [(LOGIT_ROWS, static(head, 0))]
    (logits,) = place(node, "RmsHead", inputs, sizes, eps=norm.eps, rounding=norm.rounding)
    casts = [user for user in node.outputs[0].consumers() if user.op_type == "Cast"]
    for cast in casts:
        take_place(cast.outputs[0], logits, graph)
    if not casts:
        take_place(node.outputs[0], logits, graph)
    return True


def _chosen_rows(value: ir.Value | None) -> _ChosenRows | None:
    gather, norm = made_by(value, "Gather"), norm_of(value)
    if gather is not None:
        norm = norm_of(gather.inputs[0])
        return None if norm is None else _ChosenRows(norm.x, gather.inputs[1], norm)
    if norm is None:
        return None
    gather = made_by(norm.x, "Gather")
    # A row of a weight is an embedding.
    if gather is None or recipe_of(gather.inputs[0]) is not None:
        return None
    return _ChosenRows(origin(gather.inputs[0]), gather.inputs[1], norm)
