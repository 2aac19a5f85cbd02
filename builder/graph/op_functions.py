"""Local functions for ``specbuild::`` nodes, so that a portable graph runs in any ONNX runtime.

A body depends on the types and static sizes of its inputs. An op therefore has one function for
each distinct kind of its nodes, with different ``overload`` values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from specbuild.plugins_cuda.body import CONTRIB_DOMAIN, STANDARD_OPSET, BodyBuilder
from specbuild.plugins_cuda.opspec import DOMAIN, OpSpec, TensorSpec
from specbuild.plugins_cuda.registry import op_named

_HALF = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


def add_functions(model: ir.Model) -> None:
    """Add the functions that compute the ``specbuild::`` nodes of a portable graph."""
    functions_by_key: dict[tuple[Any, ...], ir.Function] = {}
    for node in model.graph:
        if node.domain != DOMAIN:
            continue
        kind = _kind(node)
        if kind not in functions_by_key:
            others = sum(function.name == node.op_type for function in functions_by_key.values())
            functions_by_key[kind] = _function(node, str(others) if others else "")
        node.overload = functions_by_key[kind].overload
    for function in functions_by_key.values():
        model.functions[function.identifier()] = function
        for domain, version in function.opset_imports.items():
            model.graph.opset_imports.setdefault(domain, version)


def _kind(node: ir.Node) -> tuple[Any, ...]:
    """Return the properties of a node on which its function depends."""
    attributes = tuple(sorted((name, a.value) for name, a in node.attributes.items()))
    return (node.op_type, attributes, *map(_described, (*node.inputs, *node.outputs)))


def _described(value: ir.Value | None) -> tuple[Any, ...] | None:
    if value is None:
        return None
    assert value.shape is not None, value.name
    return (value.dtype, *(size if isinstance(size, int) else None for size in value.shape))


def _function(node: ir.Node, overload: str) -> ir.Function:
    op = op_named(node.op_type)
    assert op.body is not None, f"{op.name} has no body"
    given = op.complete({name: attribute.value for name, attribute in node.attributes.items()})
    absent = [None] * (len(op.inputs) - len(node.inputs))
    b = BodyBuilder()
    ports, body_value = [], []
    for spec, value in zip(op.inputs, (*node.inputs, *absent), strict=True):
        ports.append(ir.Value(name=spec.name))
        body_value.append(None if value is None else _taken(b, ports[-1], spec, value))
    results = op.body(b, body_value, given)
    outputs = [
        _given(b, result, spec, value)
        for result, spec, value in zip(results, op.outputs, node.outputs, strict=True)
    ]
    imports = {"": STANDARD_OPSET}
    if any(inner.domain == CONTRIB_DOMAIN for inner in b.nodes):
        imports[CONTRIB_DOMAIN] = 1
    graph = ir.Graph(ports, outputs, nodes=b.nodes, opset_imports=imports)
    return ir.Function(DOMAIN, op.name, overload, graph=graph, attributes=_declared(op, node))


def _declared(op: OpSpec, node: ir.Node) -> Sequence[ir.Attr]:
    """Remove attributes from the node, since the body has their values."""
    return [
        ir.Attr(spec.name, node.attributes[spec.name].type, None)
        for spec in op.attributes
        if spec.name in node.attributes
    ]


def _taken(b: BodyBuilder, port: ir.Value, spec: TensorSpec, value: ir.Value) -> ir.Value:
    """Return an input in the form of bodies: fp32, and pools in their axis order."""
    assert value.shape is not None and value.dtype is not None
    port.shape, port.type = ir.Shape(value.shape.dims), ir.TensorType(value.dtype)
    body_value = port
    if value.dtype in _HALF:
        body_value = b.cast(body_value, ir.DataType.FLOAT)
        body_value.shape, body_value.type = port.shape, ir.TensorType(ir.DataType.FLOAT)
    if spec.body_permutation is not None:
        shape, kind = [value.shape[axis] for axis in spec.body_permutation], body_value.type
        body_value = b.Transpose(body_value, perm=list(spec.body_permutation))
        body_value.shape, body_value.type = ir.Shape(shape), kind
    return body_value


def _given(b: BodyBuilder, result: ir.Value, spec: TensorSpec, value: ir.Value) -> ir.Value:
    """Return a body's result in the form of the graph."""
    permutation = spec.body_permutation
    if permutation is not None:
        result = b.Transpose(result, perm=[permutation.index(i) for i in range(len(permutation))])
    assert value.dtype is not None
    result = b.cast(result, value.dtype) if value.dtype in _HALF else b.Identity(result)
    result.name = spec.name
    return result
