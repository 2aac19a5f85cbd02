"""Replaces norm, router, experts and the residual addition of a layer by RmsMoe."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch.nn import functional as F

from specbuild.builder.backends.cuda.fusions.expert_weights import packed_experts, zero_bias
from specbuild.builder.backends.cuda.fusions.fused_node import (
    ROWS,
    as_bf16,
    as_fp32,
    packed,
    place,
    static,
    stem,
)
from specbuild.builder.backends.cuda.fusions.matching import (
    Norm,
    bias_of,
    linear_of,
    norm_of,
    only_user,
    origin,
)
from specbuild.builder.backends.cuda.fusions.shared_experts import (
    SharedExperts,
    shared_experts_of,
)
from specbuild.builder.graph.passes.rewriting import take_place
from specbuild.plugins_cuda.registry import op_named

# The indices of optional inputs of Moe.
_CHOICE_BIAS, _EXPERT_SCALE = 8, 9


@dataclass(frozen=True)
class _Routed:
    """The inputs of a ``Moe``: rows with this ``norm``, and logits of the ``router``.

    ``router_norm`` is None if the router reads the rows that the experts read.
    """

    norm: Norm
    router: ir.Node
    router_norm: Norm | None


def fuse_moe(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace ``x + Moe(norm(x), router(norm(x)))``, with or without shared experts.

    RmsMoe includes shared experts that have the form of routed ones. Others are added to its
    output: ``x + (routed + shared)`` becomes ``(x + routed) + shared``. A ``Moe``
    whose output the model norms before it is added becomes an RmsMoe without a residual.
    """
    if node.op_type != "Moe":
        return False
    routed = _routed(node)
    if routed is None:
        return False
    norm, add = routed.norm, only_user(node.outputs[0], "Add")
    if add is None:
        take_place(node.outputs[0], _place(graph, node, node, routed, residual=0), graph)
        return True
    shared_output = None
    if norm.x not in map(origin, add.inputs):
        shared_output = next(value for value in add.inputs if value is not node.outputs[0])
        add = only_user(add.outputs[0], "Add")
        if add is None or norm.x not in map(origin, add.inputs):
            return False
    shared = shared_experts_of(shared_output, node, norm)
    if shared is not None and shared.row_gate is not None and routed.router_norm is not None:
        shared = None  # the gate and the router are one projection, of rows with one norm
    y = _place(graph, node, add, routed, shared)
    if shared_output is None or shared is not None:
        take_place(add.outputs[0], y, graph)
        return True
    add.replace_input_with(0, y)
    add.replace_input_with(1, shared_output)
    return True


def _routed(moe: ir.Node) -> _Routed | None:
    """Return the inputs; None unless both norms are of one stream, the router's in fp32."""
    norm, router = norm_of(moe.inputs[0]), linear_of(moe.inputs[1])
    read = None if router is None else norm_of(router.inputs[0])
    if norm is None or router is None or read is None or (read.x, read.eps) != (norm.x, norm.eps):
        return None
    if read == norm:
        return _Routed(norm, router, None)
    return _Routed(norm, router, read) if read.rounding == "gpt_oss" else None


def _place(  # noqa: PLR0917
    graph: ir.Graph,
    moe: ir.Node,
    before: ir.Node,
    routed: _Routed,
    shared: SharedExperts | None = None,
    residual: int = 1,
) -> ir.Value:
    norm, router, router_norm = routed.norm, routed.router, routed.router_norm
    attributes = {name: value.value for name, value in moe.attributes.items()}
    inputs = {
        **_router(graph, norm, router, None if shared is None else shared.row_gate),
        **packed_experts(graph, moe, shared),
        "row_start": _row_start(graph),
        "choice_bias": _optional(moe, _CHOICE_BIAS),
        "router_norm": None if router_norm is None else as_fp32(router_norm.weight),
        "expert_scale": _optional(moe, _EXPERT_SCALE),
    }
    (y,) = place(
        before,
        "RmsMoe",
        inputs,
        [(ROWS, static(norm.weight, 0))],
        eps=norm.eps,
        rounding=norm.rounding,
        logits="fp32" if router.outputs[0].dtype == ir.DataType.FLOAT else "rounded",
        shared=0 if shared is None else shared.count,
        shared_gates=int(shared is not None and shared.row_gate is not None),
        residual=residual,
        **op_named("Moe").complete(attributes),
    )
    return y


def _optional(moe: ir.Node, index: int) -> ir.Value | None:
    """Return an fp32 input that some ``Moe`` nodes have, or None."""
    return as_fp32(moe.inputs[index]) if len(moe.inputs) > index else None


def _router(
    graph: ir.Graph, norm: Norm, router: ir.Node, row_gate: ir.Value | None
) -> dict[str, ir.Value | None]:
    """Return rows, norm, and the projection of the router; the last row of it is ``row_gate``."""
    weight, bias = as_bf16(router.inputs[1]), as_bf16(bias_of(router))
    name = stem(router.inputs[1])
    if bias is None:
        bias = zero_bias(graph, f"{name}.no_bias", weight, (static(weight, 0),))
    if row_gate is not None:
        parts = [weight, as_bf16(row_gate)]
        weight = packed(graph, f"{name}.with_gate", parts, lambda *rows: torch.cat(rows))
        bias = packed(graph, f"{name}.gate_bias", [bias], lambda bias: F.pad(bias, (0, 1)))
    return {
        "x": norm.x,
        "norm": as_bf16(norm.weight),
        "router_weight": weight,
        "router_bias": bias,
    }


def _row_start(graph: ir.Graph) -> ir.Value:
    """Return the row ranges of the launch. Rows after the last range are padding."""
    return next(value for value in graph.inputs if value.name == "row_start")
