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
    pack_down_values,
    pack_gate_up,
    pack_gate_up_bias,
    pack_gate_up_values,
    tile_bytes,
)

# What RmsMoe's routing has none of.
_UNGROUPED = {"groups": 1, "groups_chosen": 1, "group_score": "sum_of_two", "scaling": 1.0}


def fuse_moe(graph: ir.Graph, node: ir.Node) -> bool:
    """Rewrites ``x + Moe(norm(x), router(norm(x)))``."""
    if node.op_type != "Moe":
        return False
    norm, router = norm_of(node.inputs[0]), linear_of(node.inputs[1])
    add = only_user(node.outputs[0], "Add")
    if norm is None or router is None or add is None:
        return False
    if norm.x not in map(origin, add.inputs) or norm_of(router.inputs[0]) != norm:
        return False
    op = op_named("Moe")
    attributes = op.complete({name: value.value for name, value in node.attributes.items()})
    for name, neutral in _UNGROUPED.items():
        if attributes.pop(name) != neutral:
            raise AssertionError(f"RmsMoe has no {name}")
    inputs = {**_router(graph, norm, router), **_experts(graph, node)}
    inputs["row_start"] = _row_start(graph)
    sizes = [(ROWS, static(norm.weight, 0))]
    (y,) = place(add, "RmsMoe", inputs, sizes, eps=norm.eps, rounding=norm.rounding, **attributes)
    take_place(add.outputs[0], y, graph)
    return True


def _router(graph: ir.Graph, norm: Norm, router: ir.Node) -> dict[str, ir.Value | None]:
    weight, bias = router.inputs[1], as_bf16(bias_of(router))
    if bias is None:
        bias = _zeros(graph, f"{stem(weight)}.no_bias", weight, (static(weight, 0),))
    return {
        "x": norm.x,
        "norm": as_bf16(norm.weight),
        "router_weight": as_bf16(weight),
        "router_bias": bias,
    }


def _experts(graph: ir.Graph, moe: ir.Node) -> dict[str, ir.Value | None]:
    """The experts' weights: MXFP4's blocks and scales together, permuted only; or bf16."""
    given = [*moe.inputs, *[None] * len(op_named("Moe").inputs)][2:8]
    gate_up, scales, bias, down, down_scales, down_bias = map(stored, given)
    assert gate_up is not None and down is not None and gate_up.name is not None
    name = gate_up.name.removesuffix("_blocks").removesuffix("gate_up_proj")
    parents: list[ir.Value | None] = [gate_up]
    of_down: list[ir.Value | None] = [down]
    packs: tuple[Callable[..., torch.Tensor], ...] = (pack_gate_up_values, pack_down_values)
    if scales is None:
        experts, inner, hidden = (static(down, axis) for axis in range(3))
    else:
        experts, hidden, inner = static(down, 0), static(down, 1), BLOCK * static(down, 2)
        parents, of_down = [gate_up, scales], [down, down_scales]
        gate_up_shape = (experts, inner // TILE_OUTPUTS, tile_bytes(gate_up_steps(hidden)))
        down_shape = (experts, hidden // TILE_OUTPUTS, tile_bytes(down_steps(inner)))
        packs = (_shaped(pack_gate_up, gate_up_shape), _shaped(pack_down, down_shape))
    return {
        "gate_up": packed(graph, f"{name}gate_up_proj.packed", parents, packs[0]),
        "gate_up_bias": packed(graph, f"{name}gate_up_proj.packed_bias", [bias], pack_gate_up_bias)
        if bias is not None
        else _zeros(graph, f"{name}gate_up_proj.no_bias", gate_up, (experts, 2 * inner)),
        "down": packed(graph, f"{name}down_proj.packed", of_down, packs[1]),
        "down_bias": as_bf16(down_bias)
        if down_bias is not None
        else _zeros(graph, f"{name}down_proj.no_bias", down, (experts, hidden)),
    }


def _zeros(graph: ir.Graph, name: str, beside: ir.Value | None, shape: tuple[int, ...]) -> ir.Value:
    """A bias of nothing, for kernels that add one; ``beside`` is the weight that has none."""

    def make(weight: torch.Tensor) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=weight.device)

    return packed(graph, name, [beside], make)


def _shaped(
    pack: Callable[..., torch.Tensor], shape: tuple[int, ...]
) -> Callable[..., torch.Tensor]:
    """``pack``, which looks at values, as a function that also works on the meta device."""

    def make(*weights: torch.Tensor) -> torch.Tensor:
        if weights[0].is_meta:
            return torch.empty(shape, dtype=torch.uint8, device=weights[0].device)
        return pack(*weights)

    return make


def _row_start(graph: ir.Graph) -> ir.Value:
    """The launch's row ranges: rows behind the last one are padding and are not routed."""
    return next(value for value in graph.inputs if value.name == "row_start")
