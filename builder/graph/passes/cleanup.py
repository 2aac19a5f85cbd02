"""Merges equal sub-expressions and removes what nothing uses."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    RemoveUnusedNodesPass,
    TopologicalSortPass,
)

# Elements of a constant that is compared by value; a bit table of 64 is the largest in a body.
_LARGEST_CONSTANT = 64


def merge_equal(model: ir.Model) -> int:
    """One node for equal computations (the masks and slot indices that layers share)."""
    before = len(model.graph)
    CommonSubexpressionEliminationPass(size_limit=_LARGEST_CONSTANT)(model)
    return before - len(model.graph)


def remove_unused(model: ir.Model) -> int:
    """Removes nodes and initialisers without users, and restores topological order."""
    before = len(model.graph) + len(model.graph.initializers)
    RemoveUnusedNodesPass()(model)
    TopologicalSortPass()(model)
    return before - len(model.graph) - len(model.graph.initializers)
