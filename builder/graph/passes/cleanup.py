"""Merges equal subexpressions and removes unused nodes."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import (
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
