"""Small graph operations that several passes use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder

# Values with this prefix keep their names through every pass: ``verify`` compares them.
STAGE_PREFIX = "stage."


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that computes ``value`` if it has this type."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """Return the numbers of a constant or of an inline initializer, or None."""
    node = producer(value, "Constant")
    if node is None:
        return None
    for name, attribute in node.attributes.items():
        if name == "value":
            return attribute.as_tensor().numpy()
        if name == "value_ints":
            return np.asarray(attribute.as_ints(), dtype=np.int64)
        if name in ("value_int", "value_float"):
            return np.asarray(attribute.value)
    return None


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """Return the plain value of an attribute."""
    attribute_value = node.attributes.get(name)
    return default if attribute_value is None else attribute_value.value


def replace(
    node: ir.Node, builder: BodyBuilder, new_values: Sequence[ir.Value], graph: ir.Graph
) -> None:
    """Replace a node by the recorded nodes; outputs keep users, names and shapes."""
    for old, new in zip(node.outputs, new_values, strict=True):
        take_place(old, new, graph)
    graph.insert_before(node, list(builder.nodes))
    graph.remove(node, safe=True)


def take_place(old: ir.Value, new: ir.Value, graph: ir.Graph) -> None:
    """Replace all uses of ``old`` by ``new``; also the name and place of a port or stage."""
    name = old.name
    if new.shape is None:
        new.shape = old.shape
    if new.type is None:
        new.type = old.type
    named = old.is_graph_output() or (name or "").startswith(STAGE_PREFIX)
    for index, output in enumerate(graph.outputs):
        if output is old:
            graph.outputs[index] = new
    old.replace_all_uses_with(new)
    if named:
        old.name = f"{name}.replaced"
        new.name = name
