"""Replaces norms and ``specbuild::`` nodes by standard ops or ONNX Runtime contrib ops."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from specbuild.builder.graph.passes.rewriting import attribute, producer, replace, take_place
from specbuild.builder.graph.passes.weights import derive
from specbuild.plugins_cuda.body import CONTRIB_DOMAIN, BodyBuilder
from specbuild.plugins_cuda.opspec import DOMAIN
from specbuild.plugins_cuda.registry import op_named


def lower_ops(model: ir.Model) -> int:
    """Inline the bodies and return their number; bodies that derive their weights have priority."""
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
    attributes = op.complete({name: attribute.value for name, attribute in node.attributes.items()})
    inputs = [*node.inputs, *[None] * (len(op.inputs) - len(node.inputs))]
    b = BodyBuilder()
    if op.weighted_body is not None:
        outputs = op.weighted_body(b, inputs, attributes, partial(derive, graph))
    else:
        assert op.body is not None
        outputs = op.body(b, inputs, attributes)
    replace(node, b, outputs, graph)


def fuse_norms(model: ir.Model) -> int:
    """Replace norms by fused kernels, which also compute the sum ``a + b`` of a residual."""
    graph = model.graph
    changed = 0
    for node in list(graph):
        if node.op_type != "RMSNormalization":
            continue
        x, weight = node.inputs[0], node.inputs[1]
        epsilon = float(attribute(node, "epsilon", 1e-5))
        b = BodyBuilder()
        add = producer(x, "Add")
        if add is None:
            normed = b.SimplifiedLayerNormalization(x, weight, axis=-1, epsilon=epsilon)
            replace(node, b, [normed], graph)
        else:
            normed, _, _, total = b.SkipSimplifiedLayerNormalization(
                *add.inputs, weight, outputs=4, domain=CONTRIB_DOMAIN, epsilon=epsilon
            )
            # The sum can have users between the addition and the norm, so the kernel is inserted
            # at the addition.
            graph.insert_after(add, list(b.nodes))
            take_place(add.outputs[0], total, graph)
            take_place(node.outputs[0], normed, graph)
            graph.remove(node, safe=True)
            graph.remove(add, safe=True)
        changed += 1
    return changed
