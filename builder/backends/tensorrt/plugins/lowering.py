"""Lowers a fused graph at all sizes of its role: every node becomes a plugin with several forms."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from specbuild.builder.backends.cuda.step.fused_graph import (
    FusedGraph,
    Placement,
    WeightTensors,
)
from specbuild.builder.backends.cuda.step.ir import Call, ProgramIr, Storage, Tensor
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering
from specbuild.builder.backends.tensorrt.plugins.fields import PluginForm, PluginOp
from specbuild.builder.backends.tensorrt.plugins.role_sizes import RoleSizes, phase_of
from specbuild.plugins_cuda.launches import Kernel, Lowering, Phase, TensorInfo, Unsupported
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.registry import op_named


@dataclass(frozen=True)
class PluginNode:
    """A node of the fused graph and its op at every size."""

    node: ir.Node
    plugin: PluginOp


def refused_size(
    graph: FusedGraph, axes: Mapping[str, int], weights: WeightTensors, lowering: CallLowering
) -> Unsupported | None:
    """Return why a graph cannot be lowered at a size, or None if every op has kernels."""
    phase = phase_of(axes)
    for call in _placed(graph, axes, phase, weights).program.calls:
        lowered = lowering(call, phase)
        if isinstance(lowered, Unsupported):
            return lowered
    return None


def lower_graph(
    graph: FusedGraph, sizes: RoleSizes, weights: WeightTensors, lowering: CallLowering
) -> list[PluginNode]:
    """Lower every node in order. Raises SpecbuildError if an op has no kernels."""
    nodes = list(graph.model.graph)
    forms: list[list[PluginForm]] = [[] for _ in nodes]
    for axes in sizes.every():
        phase = phase_of(axes)
        placement = _placed(graph, axes, phase, weights)
        calls = placement.program.calls
        if len(calls) != len(nodes):
            raise AssertionError(f"{graph.role}: {len(nodes)} nodes, {len(calls)} calls")
        for node, call, node_forms in zip(nodes, calls, forms, strict=True):
            tensors = _tensors(placement, node, call.op)
            node_forms.append(PluginForm(tensors, _candidates(call, phase, lowering)))
    return [
        PluginNode(node, PluginOp(op_named(node.op_type), tuple(node_forms)))
        for node, node_forms in zip(nodes, forms, strict=True)
    ]


def without_candidates(plugin: PluginOp, kernels: Collection[Kernel]) -> PluginOp:
    """Remove the candidates after the first of each form that launch any of these kernels."""
    forms = [
        replace(
            form,
            lowerings=(
                form.lowerings[0],
                *(
                    lowering
                    for lowering in form.lowerings[1:]
                    if not any(launch.kernel in kernels for launch in lowering.launches)
                ),
            ),
        )
        for form in plugin.forms
    ]
    return PluginOp(plugin.op, tuple(forms))


def _placed(
    graph: FusedGraph, axes: Mapping[str, int], phase: Phase, weights: WeightTensors
) -> Placement:
    program = ProgramIr(graph.role, phase)
    placement = Placement(graph, program, weights, {}, axes)
    ports = {}
    for value in graph.model.graph.inputs:
        assert value.name is not None
        info = placement.info(value)
        ports[value.name] = Tensor(Storage(value.name, "state", info.nbytes), 0, info)
    placement = replace(placement, ports=ports)
    placement.place(list(graph.model.graph.outputs))
    return placement


def _tensors(placement: Placement, node: ir.Node, op: OpSpec) -> dict[str, TensorInfo]:
    """Return the present tensors of a node with their shapes in the graph."""
    tensors = {}
    for specs, values in ((op.inputs, node.inputs), (op.outputs, node.outputs)):
        for spec, value in zip(specs, values, strict=False):
            tensor = placement.value(value)
            if tensor is not None:
                tensors[spec.name] = tensor.info
    return tensors


def _candidates(call: Call, phase: Phase, lowering: CallLowering) -> tuple[Lowering, ...]:
    """Return the chosen lowering, and for prompt chunks the others that TensorRT may choose from.

    Decode launches have no alternatives: only the measured choice is known to give equal bits.
    """
    choice = lowering.choice(call, phase)
    candidates = [choice.lowering]
    if phase == "prefill" and choice.request.phase == "prefill":
        for tactic in choice.candidates:
            other = call.op.lowered(replace(choice.request, tactic=tactic))
            if not isinstance(other, Unsupported) and other not in candidates:
                candidates.append(other)
    return tuple(candidates)
