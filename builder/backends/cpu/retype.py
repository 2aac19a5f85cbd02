"""Retypes a graph to fp32: ONNX Runtime has no bf16 kernels on a CPU."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir
import torch

from specbuild.builder.graph.passes.rewriting import take_place
from specbuild.builder.graph.passes.weights import Recipe, recipe_of, set_recipe

_HALF = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)
_FLOATS = (*_HALF, ir.DataType.FLOAT)


def retype_to_fp32(model: ir.Model) -> int:
    """Every half-precision value becomes fp32, and casts between floats disappear."""
    graph = model.graph
    changed = 0
    for value in list(graph.initializers.values()):
        recipe = recipe_of(value)
        if recipe is not None and recipe.dtype in (torch.bfloat16, torch.float16):
            set_recipe(value, _widened(recipe))
            changed += 1
    for value in graph.inputs:
        if value.dtype in _HALF:
            value.type = ir.TensorType(ir.DataType.FLOAT)
    for node in list(graph):
        for output in node.outputs:
            if output.dtype in _HALF:
                output.type = ir.TensorType(ir.DataType.FLOAT)
        if node.op_type == "Cast":
            source = node.inputs[0]
            assert source is not None
            target = ir.DataType(node.attributes["to"].as_int())
            if target in _FLOATS and source.dtype in _FLOATS:
                _drop_cast(node, source, graph)
                changed += 1
            elif target in _HALF:
                _cast_to_fp32(node)
                changed += 1
    return changed


def _widened(recipe: Recipe) -> Recipe:
    return replace(recipe, dtype=torch.float32, load=lambda: recipe.load().float())


def _cast_to_fp32(node: ir.Node) -> None:
    node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT.value)


def _drop_cast(node: ir.Node, source: ir.Value, graph: ir.Graph) -> None:
    output = node.outputs[0]
    # Two graph outputs, or an input and an output, cannot be one value: the cast stays, idle.
    if output.is_graph_output() and (source.is_graph_output() or source.producer() is None):
        _cast_to_fp32(node)
        return
    take_place(output, source, graph)
    graph.remove(node, safe=True)
