"""Retypes graphs for a CPU: half precision to fp32, and pools of quantized caches to uint8.

ONNX Runtime has no bf16 kernels on a CPU. The ops' bodies write quantized keys and values (e4m3) to
uint8 pools and dequantize what they read (``kv_write/codes.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import onnx_ir as ir
import torch

from specbuild.builder.graph.passes.rewriting import take_place
from specbuild.builder.graph.passes.weights import Recipe, recipe_of, set_recipe

_HALF = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)
_FLOATS = (*_HALF, ir.DataType.FLOAT)
_QUANTIZED = ir.TensorType(ir.DataType.UINT8)


def retype_to_fp32(model: ir.Model) -> int:
    """Change every half-precision value to fp32, remove casts between floats, and count both."""
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
    # Two graph outputs, or an input and an output, cannot be one value. The cast then stays as a
    # copy.
    if output.is_graph_output() and (source.is_graph_output() or source.producer() is None):
        _cast_to_fp32(node)
        return
    take_place(output, source, graph)
    graph.remove(node, safe=True)


def quantize_pools(model: ir.Model, *, groups: Collection[str]) -> int:
    """Retype the pools of these cache groups to uint8 and return their number."""
    pools = [port for port in model.graph.inputs if _group_of(port) in groups]
    for pool in pools:
        _retype(pool)
    return len(pools)


def _group_of(port: ir.Value) -> str | None:
    """Return the cache group of a port ``{group}.{layer}.{part}_pool``, or None for other ports."""
    name = port.name or ""
    return name.partition(".")[0] if name.endswith("_pool") else None


def _retype(pool: ir.Value) -> None:
    """Retype a pool and the outputs that share its memory."""
    pool.type = _QUANTIZED
    for user, index in list(pool.uses()):
        if user.op_type in ("KvWrite", "KvCommit") and index == 0:
            _retype(user.outputs[0])
