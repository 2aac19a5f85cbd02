"""Packs the weights of a layer's experts for RmsMoe."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.fusions.fused_node import as_bf16, packed, static, stored
from specbuild.builder.backends.cuda.fusions.shared_experts import (
    SharedExperts,
    as_down,
    as_gate_up,
)
from specbuild.builder.graph.passes.weights import Recipe, recipe_of
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

_Pack = Callable[..., torch.Tensor]
_EXPERTS = "specbuild.single_experts"


def single_experts(value: ir.Value | None) -> tuple[tuple[Recipe, ...], ...]:
    """The weights that packed experts were made of: of each gate and up, or down.

    Empty for experts that were not stacked from single ones.
    """
    return () if value is None else value.meta.get(_EXPERTS, ())


def packed_experts(
    graph: ir.Graph, moe: ir.Node, shared: SharedExperts | None
) -> dict[str, ir.Value | None]:
    """Return MXFP4 blocks with their scales, or bf16 weights, with shared experts last."""
    tensors = [*moe.inputs, *[None] * len(op_named("Moe").inputs)][2:8]
    gate_up, scales, bias, down, down_scales, down_bias = map(stored, tensors)
    assert gate_up is not None and down is not None and gate_up.name is not None
    name = gate_up.name.removesuffix("_blocks").removesuffix("gate_up_proj")
    parents: list[ir.Value | None] = [gate_up]
    down_parents: list[ir.Value | None] = [down]
    packs: tuple[_Pack, _Pack] = (pack_gate_up_values, pack_down_values)
    if scales is None:
        experts, inner, hidden = (static(down, axis) for axis in range(3))
    else:
        experts, hidden, inner = static(down, 0), static(down, 1), BLOCK * static(down, 2)
        parents, down_parents = [gate_up, scales], [down, down_scales]
        gate_up_shape = (experts, inner // TILE_OUTPUTS, tile_bytes(gate_up_steps(hidden)))
        down_shape = (experts, hidden // TILE_OUTPUTS, tile_bytes(down_steps(inner)))
        packs = (_shaped(pack_gate_up, gate_up_shape), _shaped(pack_down, down_shape))
    if shared is not None:
        experts += shared.count
        parents, down_parents = [gate_up, shared.gate, shared.up], [down, shared.down]
        packs = _packs_with(shared.count)
    made = {
        "gate_up": packed(graph, f"{name}gate_up_proj.packed", parents, packs[0]),
        "gate_up_bias": packed(graph, f"{name}gate_up_proj.packed_bias", [bias], pack_gate_up_bias)
        if bias is not None
        else zero_bias(graph, f"{name}gate_up_proj.no_bias", gate_up, (experts, 2 * inner)),
        "down": packed(graph, f"{name}down_proj.packed", down_parents, packs[1]),
        "down_bias": as_bf16(down_bias)
        if down_bias is not None
        else zero_bias(graph, f"{name}down_proj.no_bias", down, (experts, hidden)),
    }
    if shared is None or shared.count == 1:
        _remember_experts(made["gate_up"], parents, 2)
        _remember_experts(made["down"], down_parents, 1)
    return made


def _remember_experts(value: ir.Value | None, parents: list[ir.Value | None], parts: int) -> None:
    """Keep what :func:`single_experts` returns: routed experts, then the shared one."""
    routed, *shared = [recipe_of(stored(parent)) for parent in parents]
    assert value is not None and routed is not None
    recipes = [*routed.experts, *(recipe for recipe in shared if recipe is not None)]
    if routed.experts:
        groups = range(0, len(recipes), parts)
        value.meta[_EXPERTS] = tuple(tuple(recipes[at : at + parts]) for at in groups)


def _packs_with(count: int) -> tuple[_Pack, _Pack]:
    """Return the functions that pack routed experts and this number of shared ones."""

    def gate_up(routed: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return pack_gate_up_values(routed, as_gate_up(gate, up, count))

    def down(routed: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return pack_down_values(routed, as_down(shared, count))

    return gate_up, down


def zero_bias(
    graph: ir.Graph, name: str, weight_value: ir.Value | None, shape: tuple[int, ...]
) -> ir.Value:
    """Return a bias of zeros for kernels that always add one; ``weight_value`` gives the device."""

    def make(weight: torch.Tensor) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=weight.device)

    return packed(graph, name, [weight_value], make)


def _shaped(pack: _Pack, shape: tuple[int, ...]) -> _Pack:
    """Wrap ``pack``, which reads values, so that it also supports the meta device."""

    def make(*weights: torch.Tensor) -> torch.Tensor:
        if weights[0].is_meta:
            return torch.empty(shape, dtype=torch.uint8, device=weights[0].device)
        return pack(*weights)

    return make
