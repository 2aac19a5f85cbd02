"""Dense weights of a graph become codes with scales.

A draft then proposes other tokens, and the output stays; a target gives other outputs. Norms,
biases and the embedding stay as they are.
"""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from specbuild.builder.graph.passes.weights import derive
from specbuild.plugins_cuda.linear.block_scaled import quantised
from specbuild.plugins_cuda.linear.storage import Storage
from specbuild.plugins_cuda.registry import op_named

# The packed weight of every op that multiplies by one.
_WEIGHTS = {
    "Linear": "weight",
    "RmsHead": "weight",
    "RmsQkvRope": "weight",
    "RmsSwiglu": "gate_up",
}


def quantise_weights(model: ir.Model, *, storage: Storage) -> int:
    """The weights of all fused projections in another form; how many there are."""
    graph, changed = model.graph, 0
    for node in graph:
        if node.op_type not in _WEIGHTS:
            continue
        declared = [tensor.name for tensor in op_named(node.op_type).inputs]
        index = declared.index(_WEIGHTS[node.op_type])
        weight = node.inputs[index]
        assert weight is not None
        coded = derive(
            graph, f"{weight.name}.{storage.name}", [weight], partial(quantised, storage=storage)
        )
        node.replace_input_with(index, coded)
        changed += 1
    return changed
