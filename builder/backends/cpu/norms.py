"""Norms as ONNX Runtime's fused kernels, with the residual addition where there is one."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.builder.graph.passes.rewriting import attribute, producer, replace, take_place
from specbuild.plugins_cuda.body import CONTRIB_DOMAIN, BodyBuilder


def fuse_norms(model: ir.Model) -> int:
    """``RMSNormalization(a + b)`` becomes one kernel that also gives the sum."""
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
            # The sum may have users between the addition and the norm: the kernel goes first.
            graph.insert_after(add, list(b.nodes))
            take_place(add.outputs[0], total, graph)
            take_place(node.outputs[0], normed, graph)
            graph.remove(node, safe=True)
            graph.remove(add, safe=True)
        changed += 1
    return changed
