"""Replaces the logits of a vocabulary's best clusters by ClusterLogits."""

from __future__ import annotations

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.fusions.fused_node import (
    LOGIT_ROWS,
    as_bf16,
    packed,
    place,
    static,
    stem,
    stored,
)
from specbuild.builder.backends.cuda.fusions.matching import (
    layout_origin,
    origin,
    origin_node,
)
from specbuild.builder.graph.passes.rewriting import constant_array, producer, take_place


def fuse_clustered_head(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace the ``ScatterElements`` of the logits of the best clusters into constant logits.

    The scores of the clusters are a head of their own.
    """
    if node.op_type != "ScatterElements":
        return False
    constant = producer(node.inputs[0], "Expand")
    clusters = producer(layout_origin(node.inputs[1]), "Gather")
    squeezed = origin_node(node.inputs[2], "Squeeze")
    product = None if squeezed is None else origin_node(squeezed.inputs[0], "MatMul")
    if constant is None or clusters is None or product is None:
        return False
    nearest = origin_node(clusters.inputs[1], "TopK")
    rows = origin_node(product.inputs[0], "Gather")
    selected = producer(layout_origin(product.inputs[1]), "Gather")
    if nearest is None or rows is None or selected is None:
        return False
    read, unread = constant_array(nearest.inputs[1]), constant_array(origin(constant.inputs[0]))
    if read is None or unread is None or rows.inputs[1] is not node.inputs[1]:
        return False
    order, count = stored(layout_origin(clusters.inputs[0])), static(clusters.inputs[0], 0)

    def cluster_of(tokens: torch.Tensor) -> torch.Tensor:
        size = len(tokens) // count
        numbers = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device) // size
        return torch.empty_like(numbers).scatter(0, tokens.long(), numbers)

    inputs = {
        "scores": origin(nearest.inputs[0]),
        "x": selected.inputs[0],
        "logit_rows": layout_origin(selected.inputs[1]),
        "weight": as_bf16(rows.inputs[0]),
        "cluster_of": packed(graph, f"{stem(order)}.clusters", [order], cluster_of),
    }
    sizes = [(LOGIT_ROWS, static(rows.inputs[0], 0))]
    (logits,) = place(
        node, "ClusterLogits", inputs, sizes, read=int(read.item()), unread=float(unread)
    )
    take_place(node.outputs[0], logits, graph)
    return True
