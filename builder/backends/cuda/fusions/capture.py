"""Copies hidden states for the draft into their columns right after their layer computes them."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.builder.backends.cuda.fusions.fused_node import ACTIVATIONS, ROWS, place, static
from specbuild.builder.graph.passes.rewriting import producer, take_place

AUX_HIDDEN = "captured"
# The buffer that the captures fill column by column, an uninitialized graph input. It shares memory
# with the output ``captured``.
AUX_HIDDEN_BLANK = "captured_blank"
MASK_STATE = "mask_hidden"


def fuse_captures(model: ir.Model) -> int:
    """Replace the output ``captured`` by a chain of Capture. Return the number of aux layers."""
    graph = model.graph
    output = next((value for value in graph.outputs if value.name == AUX_HIDDEN), None)
    # With a single aux layer the output is an Identity.
    join = producer(output, "Concat") or producer(output, "Identity")
    if output is None or join is None:
        return 0
    width = static(output, 1)
    aux_hidden = ir.Value(
        name=AUX_HIDDEN_BLANK, shape=ir.Shape([ROWS, width]), type=ir.TensorType(ACTIVATIONS)
    )
    graph.inputs.append(aux_hidden)
    nodes = list(graph)
    producer_index = {value: index for index, node in enumerate(nodes) for value in node.outputs}
    aux_layers = [aux_layer for aux_layer in join.inputs if aux_layer is not None]
    for column, aux_layer in sorted(
        enumerate(aux_layers), key=lambda item: producer_index[item[1]]
    ):
        inputs = {"x": aux_layer, "captured": aux_hidden}
        next_node = nodes[producer_index[aux_layer] + 1]
        (aux_hidden,) = place(next_node, "Capture", inputs, [(ROWS, width)], column=column)
    take_place(output, aux_hidden, graph)
    return len(aux_layers)


def drop_mask_state(model: ir.Model) -> int:
    """Remove the output with the state of mask rows and return how many there were."""
    outputs = model.graph.outputs
    states = [value for value in outputs if value.name == MASK_STATE]
    for value in states:
        outputs.remove(value)
    return len(states)
