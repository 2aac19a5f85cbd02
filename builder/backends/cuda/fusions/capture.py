"""The states that the draft reads go into their columns as soon as their layer has made them."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.builder.backends.cuda.fusions.fused_node import ACTIVATIONS, ROWS, place, static
from specbuild.builder.graph.passes.rewriting import producer, take_place

CAPTURED = "captured"
# A graph input without content: the buffer that the captures fill, column by column. It and the
# output ``captured`` are one buffer.
CAPTURED_BLANK = "captured_blank"


def fuse_captures(model: ir.Model) -> int:
    """The output ``captured`` becomes the last of a chain of Capture, one for each tap."""
    graph = model.graph
    output = next((value for value in graph.outputs if value.name == CAPTURED), None)
    # A single tap is handed on by an Identity.
    join = producer(output, "Concat") or producer(output, "Identity")
    if output is None or join is None:
        return 0
    width = static(output, 1)
    captured = ir.Value(
        name=CAPTURED_BLANK, shape=ir.Shape([ROWS, width]), type=ir.TensorType(ACTIVATIONS)
    )
    graph.inputs.append(captured)
    nodes = list(graph)
    made = {value: index for index, node in enumerate(nodes) for value in node.outputs}
    taps = [tap for tap in join.inputs if tap is not None]
    for column, tap in sorted(enumerate(taps), key=lambda item: made[item[1]]):
        inputs = {"x": tap, "captured": captured}
        following = nodes[made[tap] + 1]
        (captured,) = place(following, "Capture", inputs, [(ROWS, width)], column=column)
    take_place(output, captured, graph)
    return len(taps)
