"""Replaces the final norm, the selection of rows and the vocabulary projection by RmsHead."""

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
    layout_origin,
    norm_of,
    only_user,
    origin,
    origin_node,
)
from specbuild.builder.graph.passes.rewriting import take_place
from specbuild.builder.graph.passes.weights import recipe_of
from specbuild.plugins_cuda.linear.packing import TILE_ROWS, whole_tiles


@dataclass(frozen=True)
class _SelectedRows:
    """Normed rows of ``x``. The norm is per row, so rows can be selected before or after it."""

    x: ir.Value | None
    rows: ir.Value | None
    norm: Norm


def fuse_head(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace the ``Gemm`` of selected normed rows, including the divisor and cap of its logits.

    The logits are fp32.
    """
    if node.op_type != "Gemm":
        return False
    selected = _selected_rows(node.inputs[0])
    if selected is None:
        return False
    norm, head = selected.norm, node.inputs[1]
    inputs = {
        "x": selected.x,
        "logit_rows": layout_origin(selected.rows),
        "norm": as_bf16(norm.weight),
        "weight": packed_rows(graph, f"{stem(head)}.packed", [head], whole_tiles),
    }
    output, divisor, cap = _final(node.outputs[0])
    sizes = [(LOGIT_ROWS, static(head, 0))]
    attributes: dict[str, float | str] = {"eps": norm.eps, "rounding": norm.rounding}
    attributes |= {"divisor": divisor, "cap": cap}
    if static(head, 0) % TILE_ROWS:
        attributes["vocab_size"] = static(head, 0)
    (logits,) = place(node, "RmsHead", inputs, sizes, **attributes)
    casts = [user for user in output.consumers() if user.op_type == "Cast"]
    for cast in casts:
        take_place(cast.outputs[0], logits, graph)
    if not casts:
        take_place(output, logits, graph)
    return True


def _final(product: ir.Value) -> tuple[ir.Value, float, float]:
    """Return the output, divisor and cap of ``cap · tanh(product / divisor / cap)``.

    The divisor is 1 and the cap 0 if absent. An uncapped output is the value before casts.
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


def _selected_rows(value: ir.Value | None) -> _SelectedRows | None:
    gather, norm = origin_node(value, "Gather"), norm_of(value)
    if gather is not None:
        norm = norm_of(gather.inputs[0])
        return None if norm is None else _SelectedRows(norm.x, gather.inputs[1], norm)
    if norm is None:
        return None
    gather = origin_node(norm.x, "Gather")
    # A Gather from a weight is an embedding.
    if gather is None or recipe_of(gather.inputs[0]) is not None:
        return None
    return _SelectedRows(origin(gather.inputs[0]), gather.inputs[1], norm)
