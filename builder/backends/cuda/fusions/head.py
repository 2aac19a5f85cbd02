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
    constant_factor,
    laid_out,
    made_by,
    norm_of,
    only_user,
    origin,
)
from specbuild.builder.graph.passes.rewriting import take_place
from specbuild.builder.graph.passes.weights import recipe_of
from specbuild.plugins_cuda.linear.packing import TILE_ROWS, whole_tiles


@dataclass(frozen=True)
class _ChosenRows:
    """Normed rows of ``x``: the norm works on a row alone, so rows may be chosen on either side."""

    x: ir.Value | None
    rows: ir.Value | None
    norm: Norm


def fuse_head(graph: ir.Graph, node: ir.Node) -> bool:
    """Rewrites the ``Gemm`` of chosen normed rows, with what divides and caps its logits.

    They come in fp32.
    """
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
        "weight": packed_rows(graph, f"{stem(head)}.packed", [head], whole_tiles),
    }
    made, divisor, cap = _final(node.outputs[0])
    sizes = [(LOGIT_ROWS, static(head, 0))]
    attributes: dict[str, float | str] = {"eps": norm.eps, "rounding": norm.rounding}
    attributes |= {"divisor": divisor, "cap": cap}
    if static(head, 0) % TILE_ROWS:
        attributes["vocab_size"] = static(head, 0)
    (logits,) = place(node, "RmsHead", inputs, sizes, **attributes)
    casts = [user for user in made.consumers() if user.op_type == "Cast"]
    for cast in casts:
        take_place(cast.outputs[0], logits, graph)
    if not casts:
        take_place(made, logits, graph)
    return True


def _final(product: ir.Value) -> tuple[ir.Value, float, float]:
    """What a product becomes: ``cap · tanh(product / divisor / cap)``; 1 and 0 where none does so.

    The last of it is a value before casts, if it is not capped.
    """
    value, divisor = product, 1.0
    factor = constant_factor(div := only_user(value, "Div"), "Div")
    if div is not None and factor is not None:
        value, divisor = div.outputs[0], factor
    cast = only_user(value, "Cast")
    div = only_user(value if cast is None else cast.outputs[0], "Div")
    tanh = None if div is None else only_user(div.outputs[0], "Tanh")
    mul = None if tanh is None else only_user(tanh.outputs[0], "Mul")
    cap = constant_factor(mul)
    if mul is None or cap is None or constant_factor(div, "Div") != cap:
        return value, divisor, 0.0
    return mul.outputs[0], divisor, cap


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
