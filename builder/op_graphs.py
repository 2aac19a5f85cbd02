"""The graphs of single ops, in portable form, by role; ``commit`` has one op per pool."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from specbuild.builder.families.parts.gated_delta import key_heads, recurrence_ports
from specbuild.builder.families.parts.graph_io import (
    InputPort,
    output_name,
    path_ports,
    pool_ports,
    state_inputs_port,
    state_ports,
)
from specbuild.builder.graph.export import graph_value, single_op_model
from specbuild.builder.graph.passes.weights import rename_weight, weight_value
from specbuild.builder.graph.weight_sources import WeightSources
from specbuild.plugins_cuda.opspec import DOMAIN, OPSET_VERSION
from specbuild.runtime.engine_dir.drafters.record import DRAFT_GROUP, DraftGeometry, own_name
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.manifest import CacheGroup, StateGroup


def expand_graph(d: DraftGeometry, sources: WeightSources, group: str = DRAFT_GROUP) -> ir.Model:
    """The role ``expand``; the draft vocabulary's offsets are a weight of it."""
    ports = (
        InputPort("logits", torch.float32, ("BF", d.vocab)),
        InputPort("score", torch.float32, ("B", "F")),
        InputPort("top_k", torch.int32, ()),
    )
    offsets = weight_value("d2t", sources.d2t(group))
    model = single_op_model("expand", "TreeExpand", ports, {}, [offsets])
    rename_weight(model.graph, offsets, own_name(group, "d2t"))
    return model


def choose_graph(vocab: int) -> ir.Model:
    """The role ``choose``."""
    ports = (
        _floats("logits", "R", vocab),
        _floats("temperature", "R"),
        _ints("top_k", "R"),
        _floats("top_p", "R"),
        _ints("seed", "R"),
        _ints("position", "R"),
    )
    return single_op_model("choose", "Choose", ports, {})


def select_graph(depth: int) -> ir.Model:
    """The role ``select`` of a draft that grows trees."""
    ports = (
        _ints("tokens", "B", "M"),
        _floats("scores", "B", "M"),
        _ints("parents", "B", "M"),
        _ints("draft_tokens"),
    )
    return single_op_model("select", "TreeSelect", ports, {"depth": depth})


def accept_graph(depth: int) -> ir.Model:
    """The role ``accept``, for any drafter."""
    ports = (
        _ints("tokens", "B", "N1"),
        _ints("parents", "B", "N1"),
        _ints("ancestor_bits", "B", "N1", "W"),
        _ints("count", "B"),
        _ints("choice", "B", "N1"),
    )
    return single_op_model("accept", "TreeAccept", ports, {"depth": depth})


def commit_graph(
    g: TargetGeometry,
    groups: Sequence[CacheGroup],
    state_groups: Sequence[StateGroup],
    activations: torch.dtype,
) -> ir.Model:
    """The role ``commit``: one KvCommit per pool of the target, one GatedDelta per state."""
    inputs: list[ir.Value] = []
    nodes: list[ir.Node] = []
    for group in groups:
        slots = [
            graph_value(InputPort(f"{group.name}.{side}_slot", torch.int32, ("B", "D1")))
            for side in ("from", "to")
        ]
        inputs.extend(slots)
        for layer in group.layers:
            for port in pool_ports(group, layer, activations):
                pool = graph_value(port)
                inputs.append(pool)
                nodes.append(_in_place("KvCommit", [pool, *slots], [pool]))
    outputs = [node.outputs[0] for node in nodes]
    weights: list[ir.Value] = []
    for states in state_groups:
        paths = [graph_value(port) for port in path_ports(states)]
        inputs.extend(paths)
        for layer in states.layers:
            rows = graph_value(state_inputs_port(states, layer, activations))
            pools = [graph_value(port) for port in state_ports(states, layer, activations)]
            ports_of_layer = [graph_value(port) for port in recurrence_ports(g, layer, activations)]
            node = _in_place("GatedDelta", [rows, *ports_of_layer, *paths, *pools], pools, first=1)
            node.attributes["key_heads"] = ir.AttrInt64("key_heads", key_heads(g))
            inputs.extend((rows, *pools))
            weights.extend(ports_of_layer)
            nodes.append(node)
            outputs.extend(node.outputs[1:])
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        initializers=weights,
        opset_imports={"": 23, DOMAIN: OPSET_VERSION},
        name="commit",
    )
    return ir.Model(graph, ir_version=11)


def _in_place(
    op: str, inputs: Sequence[ir.Value], pools: Sequence[ir.Value], *, first: int = 0
) -> ir.Node:
    """Return a node whose outputs from ``first`` on are these pools, written."""
    node = ir.Node(DOMAIN, op, inputs, num_outputs=first + len(pools))
    for written, pool in zip(node.outputs[first:], pools, strict=True):
        assert pool.name is not None and pool.shape is not None
        written.name = output_name(pool.name)
        written.shape, written.type = ir.Shape(pool.shape.dims), pool.type
    return node


def _ints(name: str, *shape: str) -> InputPort:
    return InputPort(name, torch.int32, shape)


def _floats(name: str, *shape: int | str) -> InputPort:
    return InputPort(name, torch.float32, shape)
