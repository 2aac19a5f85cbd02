"""Every ``specbuild::`` node becomes standard ops, or ONNX Runtime contrib ops, by its body."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from specbuild.builder.graph.passes.rewriting import replace
from specbuild.builder.graph.passes.weights import derive
from specbuild.plugins_cuda.body import BodyBuilder
from specbuild.plugins_cuda.opspec import DOMAIN
from specbuild.plugins_cuda.registry import op_named


def lower_ops(model: ir.Model) -> int:
    """Inlines the bodies, by preference those that derive their weights."""
    changed = 0
    for node in list(model.graph):
        if node.domain != DOMAIN:
            continue
        _inline(model.graph, node)
        changed += 1
    model.graph.opset_imports.pop(DOMAIN, None)
    model.graph.opset_imports["com.microsoft"] = 1
    return changed


def _inline(graph: ir.Graph, node: ir.Node) -> None:
    op = op_named(node.op_type)
    given = op.complete({name: attribute.value for name, attribute in node.attributes.items()})
    inputs = [*node.inputs, *[None] * (len(op.inputs) - len(node.inputs))]
    b = BodyBuilder()
    if op.weighted_body is not None:
        outputs = op.weighted_body(b, inputs, given, partial(derive, graph))
    else:
        assert op.body is not None
        outputs = op.body(b, inputs, given)
    replace(node, b, outputs, graph)
