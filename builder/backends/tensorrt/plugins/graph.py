"""Converts a fused graph for TensorRT's parser: ops become plugin nodes, weights become inputs.

The parser resolves an op's name to its built-in importers first, then to the model's functions, and
finally to plugins. Functions are therefore removed, and plugins have distinct names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir

from specbuild.builder.graph.export import OPSET
from specbuild.builder.graph.passes.portable import portable_bytes
from specbuild.runtime.executors.tensorrt.plugin_record import (
    NAMESPACE,
    PluginRecord,
    wire_dtype,
    wire_shape,
    write_fields,
)

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

# Attributes of a plugin node that the parser reads in addition to the fields.
VERSION_ATTRIBUTE, NAMESPACE_ATTRIBUTE = "plugin_version", "plugin_namespace"
_TYPES = {
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "float32": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
}
_STORED = {
    onnx.TensorProto.BFLOAT16: "bfloat16",
    np.dtype(np.float32): "float32",
    np.dtype(np.int32): "int32",
    np.dtype(np.uint8): "uint8",
}
PluginFiles = tuple[PluginRecord, dict[str, bytes]]


def plugin_graph(
    model: ir.Model, plugins: Sequence[PluginFiles], fixed: Mapping[str, int]
) -> onnx.ModelProto:
    """Return the graph with plugin nodes; ``plugins`` has the record and cubins of each node.

    ``fixed`` has the axes with one size in all profiles. A weight becomes an input of the same
    name, which the runtime binds to device memory. The engine does not contain it.
    """
    import onnx_graphsurgeon as gs
    from onnx_graphsurgeon.logger import G_LOGGER

    G_LOGGER.severity = G_LOGGER.ERROR  # suppress its warnings about bf16 in numpy
    graph = gs.import_onnx(onnx.load_model_from_string(portable_bytes(model)))
    graph.functions.clear()
    if len(graph.nodes) != len(plugins):
        raise AssertionError(f"{len(graph.nodes)} nodes, {len(plugins)} plugins")
    for node, plugin in zip(graph.nodes, plugins, strict=True):
        _become_plugin(node, plugin)
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Constant):
            graph.inputs.append(_as_input(tensor))
        elif tensor.shape is not None:
            tensor.shape = [fixed.get(size, size) for size in tensor.shape]
    graph.toposort()
    exported = gs.export_onnx(graph)
    if not any(entry.domain == "" for entry in exported.opset_import):
        # A graph of plugins only imports no standard op set, but the parser requires one.
        exported.opset_import.append(onnx.helper.make_opsetid("", OPSET))
    return exported


def _become_plugin(node: gs.Node, plugin: PluginFiles) -> None:
    record, cubins = plugin
    if node.op != record.op:
        raise AssertionError(f"a {node.op} node received the fields of {record.op}")
    fields = write_fields(record, cubins)
    node.op, node.domain = record.name, NAMESPACE
    node.inputs = [tensor for tensor in node.inputs if not tensor.is_empty()]
    node.attrs = {
        VERSION_ATTRIBUTE: record.plugin_version,
        NAMESPACE_ATTRIBUTE: NAMESPACE,
        **{name: data.decode() for name, data in fields.items()},
    }


def _as_input(constant: gs.Constant) -> gs.Variable:
    dtype = _STORED[constant.dtype]
    shape = wire_shape(dtype, constant.shape)
    variable = constant.to_variable(_TYPES[wire_dtype(dtype)], list(shape))
    variable.type = "tensor_type"  # to_variable does not set it
    return variable
