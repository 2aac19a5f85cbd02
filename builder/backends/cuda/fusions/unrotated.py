"""Rotate queries and keys of layers without RoPE by zero, so that fuse-qkv has one form."""

from __future__ import annotations

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.fusions.matching import laid_out
from specbuild.builder.graph.passes.rewriting import producer
from specbuild.builder.graph.passes.weights import derive, recipe_of

_ROTARY = "RotaryEmbedding"


def rotate_by_zero(graph: ir.Graph, node: ir.Node) -> bool:
    """Puts a rotation by tables of angle 0 in front of an attention and of its layer's keys.

    The tables are as long as those of the graph's other layers; without any, nothing changes.
    """
    if node.op_type != "PagedTreeAttention":
        return False
    write = producer(node.inputs[1], "KvWrite")
    found = [node.inputs[0], None if write is None else write.inputs[1]]
    if any(value is None or _is_rotated(value) for value in found):
        return False
    tables = _still_tables(graph)
    if tables is None:
        return False
    for value in found:
        if value is not None:
            _rotate_by_zero(graph, value, tables)
    return True


def _is_rotated(value: ir.Value) -> bool:
    """Whether it is rotated, or comes from elsewhere than a projection."""
    node = producer(laid_out(value), "RMSNormalization")
    projected = laid_out(value) if node is None else laid_out(node.inputs[0])
    return producer(projected, "Gemm") is None


def _still_tables(graph: ir.Graph) -> tuple[ir.Value, ir.Value] | None:
    """Cosines of 1 and sines of 0 in the shape of the tables of a layer that turns."""
    rotary = next((node for node in graph if node.op_type == _ROTARY), None)
    given = [] if rotary is None else [laid_out(value) for value in rotary.inputs[1:3]]
    tables = [value for value in given if value is not None and recipe_of(value) is not None]
    if len(tables) != 2:
        return None
    cos, sin = tables
    return (
        derive(graph, f"{cos.name}.still", [cos], torch.ones_like),
        derive(graph, f"{sin.name}.still", [sin], torch.zeros_like),
    )


def _rotate_by_zero(graph: ir.Graph, value: ir.Value, tables: tuple[ir.Value, ir.Value]) -> None:
    positions = next(given for given in graph.inputs if given.name == "positions")
    rotary = ir.node(_ROTARY, [value, *tables, positions])
    turned = rotary.outputs[0]
    turned.shape, turned.type = value.shape, value.type
    maker = value.producer()
    assert maker is not None
    for user, index in list(value.uses()):
        if user is not rotary:
            user.replace_input_with(index, turned)
    graph.insert_after(maker, rotary)
