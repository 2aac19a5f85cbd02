"""Norm, router, experts and the residual addition of a layer become RmsMoe."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.fusions.fused_node import (
    ROWS,
    as_bf16,
    packed,
    place,
    static,
    stem,
    stored,
)
from specbuild.builder.backends.cuda.fusions.matching import (
    Norm,
    bias_of,
    linear_of,
    norm_of,
    only_user,
    origin,
)
from specbuild.builder.graph.passes.rewriting import take_place
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_moe.packing import (
    BLOCK,
    TILE_OUTPUTS,
    down_steps,
    gate_up_steps,
    pack_down,
    pack_gate_up,
    pack_gate_up_bias,
    tile_bytes,
)

# What RmsMoe's routing has none of.
_UNGROUPED = {"groups": 1, "groups_chosen": 1, "group_score": "sum_of_two", "scaling": 1.0}

Pack = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fuse_moe(graph: ir.Graph, node: ir.Node) -> bool:
    """Rewrites ``x + Moe(norm(x), router(norm(x)))``."""
    if node.op_type != "Moe":
        return False
    norm, router = norm_of(node.inputs[0]), linear_of(node.inputs[1])
    add = only_user(node.outputs[0], "Add")
    if norm is None or norm.rounding != "gpt_oss" or router is None or add is None:
        return False
    if norm.x not in map(origin, add.inputs) or norm_of(router.inputs[0]) != norm:
        return False
    op = op_named("Moe")
    attributes = op.complete({name: value.value for name, value in node.attributes.items()})
    activation = attributes.pop("activation")
    if activation != "swiglu_clamped":
        raise AssertionError(f"RmsMoe computes swiglu_clamped, the graph has {activation}")
    for name, neutral in _UNGROUPED.items():
        if attributes.pop(name) != neutral:
            raise AssertionError(f"RmsMoe has no {name}")
    inputs = {**_router(norm, router), **_experts(graph, node), "row_start": _row_start(graph)}
    sizes = [(ROWS, static(norm.weight, 0))]
    (y,) = place(add, "RmsMoe", inputs, sizes, eps=norm.eps, **attributes)
    take_place(add.outputs[0], y, graph)
    return True


def _router(norm: Norm, router: ir.Node) -> dict[str, ir.Value | None]:
    return {
        "x": norm.x,
        "norm": as_bf16(norm.weight),
        "router_weight": as_bf16(router.inputs[1]),
        "router_bias": as_bf16(bias_of(router)),
    }


def _experts(graph: ir.Graph, moe: ir.Node) -> dict[str, ir.Value | None]:
    """The experts' weights: blocks and scales together, permuted only."""
    blocks, scales, bias, down, down_scales, down_bias = map(stored, moe.inputs[2:8])
    assert blocks is not None and blocks.name is not None
    if scales is None:
        raise AssertionError(f"{stem(blocks)}: RmsMoe takes MXFP4 experts")
    name = blocks.name.removesuffix("gate_up_proj_blocks")
    experts, hidden, inner = static(down, 0), static(down, 1), BLOCK * static(down, 2)
    gate_up_shape = (experts, inner // TILE_OUTPUTS, tile_bytes(gate_up_steps(hidden)))
    down_shape = (experts, hidden // TILE_OUTPUTS, tile_bytes(down_steps(inner)))
    make_gate_up, make_down = _shaped(pack_gate_up, gate_up_shape), _shaped(pack_down, down_shape)
    return {
        "gate_up": packed(graph, f"{name}gate_up_proj.packed", [blocks, scales], make_gate_up),
        "gate_up_bias": packed(graph, f"{name}gate_up_proj.packed_bias", [bias], pack_gate_up_bias),
        "down": packed(graph, f"{name}down_proj.packed", [down, down_scales], make_down),
        "down_bias": as_bf16(down_bias),
    }


def _shaped(pack: Pack, shape: tuple[int, ...]) -> Pack:
    """``pack``, which looks at the scales, as a function that also works on the meta device."""

    def make(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if blocks.is_meta:
            return torch.empty(shape, dtype=torch.uint8, device=blocks.device)
        return pack(blocks, scales)

    return make


def _row_start(graph: ir.Graph) -> ir.Value:
    """The launch's row ranges: rows behind the last one are padding and are not routed."""
    return next(value for value in graph.inputs if value.name == "row_start")
