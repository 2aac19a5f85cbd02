"""Writes the states that the draft reads to their columns as soon as their layer computes them."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.builder.backends.cuda.fusions.fused_node import ACTIVATIONS, ROWS, place, static
from specbuild.builder.graph.passes.rewriting import producer, take_place

AUX_HIDDEN = "captured"
# A graph input without content: the buffer that the captures fill, column by column. It and the
# output ``captured`` are one buffer.
AUX_HIDDEN_BLANK = "captured_blank"
MASK_STATE = "mask_hidden"


def fuse_captures(model: ir.Model) -> int:
    """The output ``captured`` becomes the last of a chain of Capture, one for each aux layer."""
    graph = model.graph
    output = next((value for value in graph.outputs if value.name == AUX_HIDDEN), None)
    # A single aux layer's is handed on by an Identity.
    join = producer(output, "Concat") or producer(output, "Identity")
    if output is None or join is None:
        return 0
    width = static(output, 1)
    aux_hidden = ir.Value(
        name=AUX_HIDDEN_BLANK, shape=ir.Shape([ROWS, width]), type=ir.TensorType(ACTIVATIONS)
    )
    graph.inputs.append(aux_hidden)
    nodes = list(graph)
    made = {value: index for index, node in enumerate(nodes) for value in node.outputs}
    aux_layers = [aux_layer for aux_layer in join.inputs if aux_layer is not None]
    for column, aux_layer in sorted(enumerate(aux_layers), key=lambda item: made[item[1]]):
        inputs = {"x": aux_layer, "captured": aux_hidden}
        following = nodes[made[aux_layer] + 1]
        (aux_hidden,) = place(following, "Capture", inputs, [(ROWS, width)], column=column)
    take_place(output, aux_hidden, graph)
    return len(aux_layers)


def drop_mask_state(model: ir.Model) -> int:
    """The output that hands on the mask rows' state goes; what made it is removed as unused."""
    outputs = model.graph.outputs
    found = [value for value in outputs if value.name == MASK_STATE]
    for value in found:
        outputs.remove(value)
    return len(found)
