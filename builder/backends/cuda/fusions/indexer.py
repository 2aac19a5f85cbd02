"""Replaces the norm, an indexer's projections and its key write by RmsIndexer (DSA).

DsaIndexer and DsaCheck then read its outputs. The length of lists is a size of the launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from specbuild.builder.backends.cuda.fusions.fused_node import (
    LIST_LENGTH,
    ROWS,
    SEQUENCES,
    packed,
    place,
    static,
    stem,
)
from specbuild.builder.backends.cuda.fusions.matching import layout_origin, origin
from specbuild.builder.backends.cuda.fusions.qkv import input_and_norm
from specbuild.builder.graph.passes.rewriting import producer, take_place
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_indexer.packing import pack_indexer
from specbuild.runtime.engine_dir.manifest import INDEXER_GROUP

VIOLATIONS = f"{INDEXER_GROUP}.violations"


def fuse_indexer(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace one DsaCheck and the nodes before it."""
    indexer = producer(node.inputs[0], "DsaIndexer") if node.op_type == "DsaCheck" else None
    write = None if indexer is None else producer(indexer.inputs[2], "KvWrite")
    if indexer is None or write is None:
        return False
    queries, head_weights, key = (
        producer(layout_origin(value), "MatMul")
        for value in (indexer.inputs[0], indexer.inputs[1], _unrounded(write.inputs[1]))
    )
    if queries is None or key is None:
        return False
    products = [product for product in (queries, key, head_weights) if product is not None]
    if len({origin(product.inputs[0]) for product in products}) != 1:
        raise AssertionError(f"{stem(queries.inputs[1])}: projections of different inputs")
    heads, width = static(indexer.inputs[0], 1), static(indexer.inputs[0], 2)
    name = stem(queries.inputs[1]).removesuffix("_W_q")
    inputs, eps = input_and_norm(queries.inputs[0])
    pool = write.inputs[0]
    assert pool is not None and pool.shape is not None
    inputs |= {
        "weight": packed(graph, f"{name}.packed", [p.inputs[1] for p in products], pack_indexer),
        "write_slot": write.inputs[2],
        "key_pool": pool,
    }
    sizes: list[Sequence[int | str] | ir.Shape] = [(ROWS, heads, width), (ROWS, heads), pool.shape]
    q, weights, written = place(node, "RmsIndexer", inputs, sizes, heads=heads, eps=eps)
    take_place(write.outputs[0], written, graph)
    _place_weighted(graph, node, indexer, q, weights)
    _place_lists(graph, node, indexer, q, None if head_weights is None else weights, written)
    return True


def _place_weighted(
    graph: ir.Graph, check: ir.Node, indexer: ir.Node, q: ir.Value, weights: ir.Value
) -> None:
    """For SpecPV's selection by an indexer, multiply its queries by the weights of heads."""
    queries = indexer.inputs[0]
    assert queries is not None and q.shape is not None
    for product in [user for user in queries.consumers() if user.op_type == "Mul"]:
        (weighted,) = place(check, "WeighHeads", {"q": q, "head_weights": weights}, [q.shape])
        take_place(product.outputs[0], weighted, graph)
    for user in [user for user in queries.consumers() if user.op_type == "KvBlockSelect"]:
        user.replace_input_with(list(user.inputs).index(queries), q)


def _unrounded(keys: ir.Value | None) -> ir.Value | None:
    """Return keys before the rounding to fp8, which the write kernel does."""
    value = layout_origin(keys)
    node = None if value is None else value.producer()
    while node is not None and node.op_type == "Cast":
        value = layout_origin(node.inputs[0])
        node = None if value is None else value.producer()
    return value


def _place_lists(  # noqa: PLR0917
    graph: ir.Graph,
    check: ir.Node,
    indexer: ir.Node,
    q: ir.Value,
    head_weights: ir.Value | None,
    pool: ir.Value,
) -> None:
    """Insert DsaIndexer and DsaCheck with the outputs of RmsIndexer."""
    views = static(indexer.inputs[3], 1)
    inputs = dict(zip((s.name for s in op_named("DsaIndexer").inputs), indexer.inputs, strict=True))
    inputs |= {"q": q, "head_weights": head_weights, "key_pool": pool}
    list_sizes = (ROWS, views, LIST_LENGTH)
    attributes = {name: attribute.value for name, attribute in indexer.attributes.items()}
    (lists,) = place(check, "DsaIndexer", inputs, [list_sizes], **attributes)
    check_inputs = dict(
        zip((s.name for s in op_named("DsaCheck").inputs), check.inputs, strict=True)
    )
    attributes = {name: attribute.value for name, attribute in check.attributes.items()}
    outputs = place(
        check,
        "DsaCheck",
        check_inputs | {"selected": lists},
        [list_sizes, (SEQUENCES,)],
        **attributes,
    )
    for old, new in zip(check.outputs, outputs, strict=True):
        take_place(old, new, graph)


def unstack_violations(model: ir.Model) -> int:
    """Replace the stacked counts of invalid lists by the outputs of each DsaCheck."""
    graph = model.graph
    stacked = next((value for value in graph.outputs if value.name == VIOLATIONS), None)
    if stacked is None:
        return 0
    counts = [node.outputs[1] for node in graph if node.op_type == "DsaCheck"]
    index = graph.outputs.index(stacked)
    stacked.name = f"{VIOLATIONS}.stacked"
    for i, value in enumerate(counts):
        value.name = f"{VIOLATIONS}.{i}"
    graph.outputs[index : index + 1] = counts
    return len(counts)
