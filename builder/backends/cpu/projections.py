"""Q, K and V of a layer from one Gemm, rotated together, heads first.

Before: three Gemms, two rotations, and a [T, heads, D] layout that attention and cache writing
transpose. After: one Gemm, one transposition, one rotation of Q and K side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import torch

from specbuild.builder.passes.rewriting import attribute, producer
from specbuild.builder.passes.weights import derive
from specbuild.plugins_cuda.body import BodyBuilder, static_size


@dataclass(frozen=True)
class _Rotated:
    gemm: ir.Node
    rotary: ir.Node


@dataclass(frozen=True)
class _Layer:
    """The nodes around one attention, as the export leaves them."""

    attention: ir.Node
    k_write: ir.Node
    v_write: ir.Node
    q: _Rotated
    k: _Rotated
    v_gemm: ir.Node


def merge_projections(model: ir.Model) -> int:
    """Rewrites every layer whose three projections read one input."""
    changed = 0
    for node in list(model.graph):
        if node.op_type == "PagedTreeAttention":
            layer = _match(node)
            if layer is not None:
                _rewrite(model.graph, layer)
                changed += 1
    return changed


def _match(attention: ir.Node) -> _Layer | None:
    k_write = producer(attention.inputs[1], "KvWrite")
    v_write = producer(attention.inputs[2], "KvWrite")
    if k_write is None or v_write is None:
        return None
    q, k = _rotated(attention.inputs[0]), _rotated(k_write.inputs[1])
    v_gemm = producer(_through(v_write.inputs[1]), "Gemm")
    if q is None or k is None or v_gemm is None:
        return None
    if not _joinable((q.gemm, k.gemm, v_gemm)):
        return None
    return _Layer(attention, k_write, v_write, q, k, v_gemm)


def _joinable(gemms: tuple[ir.Node, ir.Node, ir.Node]) -> bool:
    """Whether one Gemm over the joined weights computes all three: one input, biases or none."""
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
    """The value before reshapes and unsqueezes."""
    while (node := producer(value, "Reshape") or producer(value, "Unsqueeze")) is not None:
        value = node.inputs[0]
    return value


def _rotated(value: ir.Value | None) -> _Rotated | None:
    rotary = producer(_through(value), "RotaryEmbedding")
    gemm = None if rotary is None else producer(_through(rotary.inputs[0]), "Gemm")
    return None if rotary is None or gemm is None else _Rotated(gemm, rotary)


def _rewrite(graph: ir.Graph, layer: _Layer) -> None:
    q_value, k_value = layer.attention.inputs[0], layer.k_write.inputs[1]
    v_value = layer.v_write.inputs[1]
    assert q_value is not None and k_value is not None and v_value is not None
    q_heads, width = static_size(q_value, 1), static_size(q_value, 2)
    kv_heads = static_size(k_value, 1)
    gemms = (layer.q.gemm, layer.k.gemm, layer.v_gemm)
    b = BodyBuilder()
    joined = _joined_gemm(b, graph, gemms)
    by_head = b.Transpose(
        b.reshape(joined, 1, -1, q_heads + 2 * kv_heads, width), perm=[0, 2, 1, 3]
    )
    qk, v = b.Split(by_head, b.i64(q_heads + kv_heads, kv_heads), outputs=2, axis=1)
    rotated = b.RotaryEmbedding(qk, *layer.q.rotary.inputs[1:])
    q, k = b.Split(rotated, b.i64(q_heads, kv_heads), outputs=2, axis=1)
    for old, new, heads in ((q_value, q, q_heads), (k_value, k, kv_heads), (v_value, v, kv_heads)):
        rows_first = b.Transpose(b.reshape(new, heads, -1, width), perm=[1, 0, 2])
        rows_first.shape, rows_first.type = old.shape, old.type
        old.replace_all_uses_with(rows_first)
    graph.insert_before(layer.k_write, list(b.nodes))


def _joined_gemm(
    b: BodyBuilder, graph: ir.Graph, gemms: tuple[ir.Node, ir.Node, ir.Node]
) -> ir.Value:
    weights = [gemm.inputs[1] for gemm in gemms]
    biases = [gemm.inputs[2] if len(gemm.inputs) > 2 else None for gemm in gemms]
    name = _common_name(weights)
    weight = derive(graph, f"{name}qkv_proj.weight", weights, lambda *w: torch.cat(w))
    inputs = [gemms[0].inputs[0], weight]
    if all(bias is not None for bias in biases):
        inputs.append(derive(graph, f"{name}qkv_proj.bias", biases, lambda *p: torch.cat(p)))
    result: ir.Value = b.Gemm(*inputs, transB=1)
    return result


def _common_name(weights: list[ir.Value | None]) -> str:
    first = weights[0]
    assert first is not None and first.name is not None
    return first.name.removesuffix("q_proj.weight")
