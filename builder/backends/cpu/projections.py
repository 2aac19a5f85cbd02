"""Computes Q, K and V of a layer by one Gemm and rotates Q and K together, heads first.

Before: three Gemms, two rotations, and a [T, heads, D] layout that attention and cache writes
transpose. After: one Gemm, one transposition, and one rotation of the concatenated Q and K.
"""

from __future__ import annotations

import onnx_ir as ir

from specbuild.builder.graph.passes.attention_layers import AttentionLayer, attention_layer
from specbuild.builder.graph.passes.rewriting import attribute, producer
from specbuild.builder.graph.passes.weights import derive_stacked
from specbuild.plugins_cuda.body import BodyBuilder, static_size


def merge_projections(model: ir.Model) -> int:
    """Rewrite every layer whose three projections read one input, and return their number."""
    changed = 0
    for node in list(model.graph):
        if node.op_type == "PagedTreeAttention":
            layer = attention_layer(node, _through)
            if layer is not None and _joinable(layer.gemms):
                _rewrite(model.graph, layer)
                changed += 1
    return changed


def _joinable(gemms: tuple[ir.Node, ir.Node, ir.Node]) -> bool:
    """Return whether one Gemm with stacked weights computes all three projections."""
    inputs = {gemm.inputs[0] for gemm in gemms}
    biased = {len(gemm.inputs) > 2 and gemm.inputs[2] is not None for gemm in gemms}
    plain = all(
        attribute(gemm, "transB", 0) == 1
        and attribute(gemm, "transA", 0) == 0
        and attribute(gemm, "alpha", 1.0) == attribute(gemm, "beta", 1.0) == 1.0
        for gemm in gemms
    )
    return len(inputs) == 1 and len(biased) == 1 and plain


def _through(value: ir.Value | None) -> ir.Value | None:
    """Return the value before reshapes and unsqueezes."""
    while (node := producer(value, "Reshape") or producer(value, "Unsqueeze")) is not None:
        value = node.inputs[0]
    return value


def _rewrite(graph: ir.Graph, layer: AttentionLayer) -> None:
    q_value, k_value = layer.attention.inputs[0], layer.k_write.inputs[1]
    v_value = layer.v_write.inputs[1]
    assert q_value is not None and k_value is not None and v_value is not None
    q_heads, head_dim = static_size(q_value, 1), static_size(q_value, 2)
    kv_heads = static_size(k_value, 1)
    b = BodyBuilder()
    projected = _joined_gemm(b, graph, layer.gemms)
    by_head = b.Transpose(
        b.reshape(projected, 1, -1, q_heads + 2 * kv_heads, head_dim), perm=[0, 2, 1, 3]
    )
    qk, v = b.Split(by_head, b.i64(q_heads + kv_heads, kv_heads), outputs=2, axis=1)
    width = attribute(layer.q.rotary, "rotary_embedding_dim", 0)
    # ONNX Runtime requires the number of heads for a partial rotation.
    options = {"num_heads": q_heads + kv_heads, "rotary_embedding_dim": width} if width else {}
    rotated = b.RotaryEmbedding(qk, *layer.q.rotary.inputs[1:], **options)
    q, k = b.Split(rotated, b.i64(q_heads, kv_heads), outputs=2, axis=1)
    for old, new, heads in ((q_value, q, q_heads), (k_value, k, kv_heads), (v_value, v, kv_heads)):
        rows_first = b.Transpose(b.reshape(new, heads, -1, head_dim), perm=[1, 0, 2])
        rows_first.shape, rows_first.type = old.shape, old.type
        old.replace_all_uses_with(rows_first)
    graph.insert_before(layer.k_write, list(b.nodes))


def _joined_gemm(
    b: BodyBuilder, graph: ir.Graph, gemms: tuple[ir.Node, ir.Node, ir.Node]
) -> ir.Value:
    weights = [gemm.inputs[1] for gemm in gemms]
    biases = [gemm.inputs[2] if len(gemm.inputs) > 2 else None for gemm in gemms]
    name = _common_name(weights)
    weight = derive_stacked(graph, f"{name}qkv_proj.weight", weights)
    inputs = [gemms[0].inputs[0], weight]
    if all(bias is not None for bias in biases):
        inputs.append(derive_stacked(graph, f"{name}qkv_proj.bias", biases))
    output: ir.Value = b.Gemm(*inputs, transB=1)
    return output


def _common_name(weights: list[ir.Value | None]) -> str:
    first = weights[0]
    assert first is not None and first.name is not None
    return first.name.removesuffix("q_proj.weight")
