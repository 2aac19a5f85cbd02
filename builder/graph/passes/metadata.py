"""Removes the exporter's metadata: stack traces with absolute paths, producer versions."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass


def clear_metadata(model: ir.Model) -> int:
    """Remove metadata and documentation of the model, its graph, nodes and values."""
    ClearMetadataAndDocStringPass()(model)
    model.producer_name = "specbuild"
    model.producer_version = None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    for node in model.graph:
        node.metadata_props.clear()
        values.extend(node.outputs)
    for value in values:
        value.metadata_props.clear()
    return len(values)
