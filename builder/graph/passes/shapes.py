"""Replaces reshapes to computed shapes by reshapes to constant ones."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.builder.graph.passes.rewriting import constant_array, producer, replace
from specbuild.plugins_cuda.body import BodyBuilder


def constant_reshapes(model: ir.Model) -> int:
    """Replace ``Reshape(x, Concat(size of x, 4, 16))`` by ``Reshape(x, [-1, 4, 16])``.

    A reshape keeps the number of elements, so one computed size may always be inferred.
    """
    changed = 0
    for node in list(model.graph):
        if node.op_type != "Reshape" or node.domain:
            continue
        concat = producer(node.inputs[1], "Concat")
        if concat is None:
            continue
        parts = [constant_array(part) for part in concat.inputs]
        computed = [part for part, size in zip(concat.inputs, parts, strict=True) if size is None]
        if len(computed) > 1 or any(map(_holds_several, computed)):
            continue
        sizes = [size for part in parts for size in ([-1] if part is None else part.tolist())]
        if sizes.count(-1) > 1 or 0 in sizes:
            continue
        b = BodyBuilder()
        replace(node, b, [b.reshape(_input(node, 0), *sizes)], model.graph)
        changed += 1
    return changed


def chained_reshapes(model: ir.Model) -> int:
    """Let a reshape of a reshape read the input of the first one."""
    changed = 0
    for node in list(model.graph):
        if node.op_type != "Reshape":
            continue
        target = constant_array(node.inputs[1])
        inner = producer(node.inputs[0], "Reshape") or producer(node.inputs[0], "Unsqueeze")
        # A 0 would copy a size of the inner shape.
        if inner is not None and target is not None and 0 not in target.tolist():
            node.replace_input_with(0, inner.inputs[0])
            changed += 1
    return changed


def cancelled_transposes(model: ir.Model) -> int:
    """Remove two transpositions that cancel each other."""
    changed = 0
    for node in list(model.graph):
        inner = producer(node.inputs[0], "Transpose") if node.op_type == "Transpose" else None
        if inner is None:
            continue
        first, second = inner.attributes["perm"].as_ints(), node.attributes["perm"].as_ints()
        if [first[axis] for axis in second] == list(range(len(first))):
            node.outputs[0].replace_all_uses_with(_input(inner, 0))
            changed += 1
    return changed


def _holds_several(part: ir.Value | None) -> bool:
    """Return whether a part of a computed shape has more than one size."""
    return part is not None and part.shape is not None and part.shape.dims != (1,)


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value
