"""Rotates queries and keys of layers without RoPE by angle 0, so that fuse-qkv has one form."""

from __future__ import annotations

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.fusions.matching import layout_origin
from specbuild.builder.graph.passes.rewriting import producer
from specbuild.builder.graph.passes.weights import derive, recipe_of

_ROTARY = "RotaryEmbedding"


def rotate_by_zero(graph: ir.Graph, node: ir.Node) -> bool:
    """Insert rotations by tables of angle 0 before an attention and for its layer's keys.

    The tables have the size of those of the graph's other layers. Without any, nothing changes.
    """
    if node.op_type != "PagedTreeAttention":
        return False
    write = producer(node.inputs[1], "KvWrite")
    values = [node.inputs[0], None if write is None else write.inputs[1]]
    if any(value is None or _is_rotated(value) for value in values):
        return False
    tables = _zero_angle_tables(graph)
    if tables is None:
        return False
    for value in values:
        if value is not None:
            _rotate(graph, value, tables)
    return True


def _is_rotated(value: ir.Value) -> bool:
    """Return whether a value is rotated, or does not come from a projection."""
    node = producer(layout_origin(value), "RMSNormalization")
    projected = layout_origin(value) if node is None else layout_origin(node.inputs[0])
    return producer(projected, "Gemm") is None


def _zero_angle_tables(graph: ir.Graph) -> tuple[ir.Value, ir.Value] | None:
    """Return cosines of 1 and sines of 0 in the shape of a rotated layer's tables."""
    rotary = next((node for node in graph if node.op_type == _ROTARY), None)
    inputs = [] if rotary is None else [layout_origin(value) for value in rotary.inputs[1:3]]
    tables = [value for value in inputs if value is not None and recipe_of(value) is not None]
    if len(tables) != 2:
        return None
    cos, sin = tables
    return (
        derive(graph, f"{cos.name}.still", [cos], torch.ones_like),
        derive(graph, f"{sin.name}.still", [sin], torch.zeros_like),
    )


def _rotate(graph: ir.Graph, value: ir.Value, tables: tuple[ir.Value, ir.Value]) -> None:
    positions = next(port for port in graph.inputs if port.name == "positions")
    rotary = ir.node(_ROTARY, [value, *tables, positions])
    rotated = rotary.outputs[0]
    rotated.shape, rotated.type = value.shape, value.type
    source = value.producer()
    assert source is not None
    for user, index in list(value.uses()):
        if user is not rotary:
            user.replace_input_with(index, rotated)
    graph.insert_after(source, rotary)
