"""Merges equal subexpressions, and removes unused nodes and the exporter's metadata."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import (
    ClearMetadataAndDocStringPass,
    CommonSubexpressionEliminationPass,
    RemoveUnusedNodesPass,
    TopologicalSortPass,
)

# The maximum size of constants that are compared by value; the largest table in a body has 64.
_LARGEST_CONSTANT = 64


def merge_equal(model: ir.Model) -> int:
    """Keep one node for equal computations (masks and slot indices that layers share)."""
    before = len(model.graph)
    CommonSubexpressionEliminationPass(size_limit=_LARGEST_CONSTANT)(model)
    return before - len(model.graph)


def remove_unused(model: ir.Model) -> int:
    """Remove nodes and initializers without users, and restore topological order."""
    before = len(model.graph) + len(model.graph.initializers)
    RemoveUnusedNodesPass()(model)
    TopologicalSortPass()(model)
    return before - len(model.graph) - len(model.graph.initializers)


def clear_metadata(model: ir.Model) -> int:
    """Remove metadata and documentation of the model, its graph, nodes and values.

    They have stack traces with absolute paths, and versions of producers.
    """
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
