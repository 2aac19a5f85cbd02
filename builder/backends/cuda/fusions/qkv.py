"""Norm, Q, K and V projections, rotation and cache writing of a layer become RmsQkvRope.

The attention then reads the pools that it gives.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import onnx_ir as ir

from specbuild.builder.backends.cuda.fusions.fused_node import (
    ROWS,
    as_bf16,
    as_fp32,
    packed,
    place,
    static,
    stem,
)
from specbuild.builder.backends.cuda.fusions.matching import (
    Norm,
    bias_of,
    laid_out,
    norm_of,
    origin,
    read_norm,
)
from specbuild.builder.graph.passes.attention_layers import AttentionLayer, attention_layer
from specbuild.builder.graph.passes.rewriting import take_place
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_qkv_rope.packing import pack_qkv, pack_qkv_bias


def fuse_qkv(graph: ir.Graph, node: ir.Node) -> bool:
    """Rewrites one PagedTreeAttention and what stands in front of it, norms of heads included."""
    if node.op_type != "PagedTreeAttention":
        return False
    layer = attention_layer(node, laid_out, head_norms=True)
    if layer is None:
        return False
    _require_one_input(layer)
    q, *pools = _place_projections(graph, layer)
    for write, pool in zip((layer.k_write, layer.v_write), pools, strict=True):
        take_place(write.outputs[0], pool, graph)
    # What else reads the rotated queries (SpecPV's choice of blocks) stands behind the attention.
    for user, index in [*node.inputs[0].uses()] if node.inputs[0] is not None else []:
        if user is not node:
            user.replace_input_with(index, q)
    _place_attention(graph, node, q)
    return True


def _require_one_input(layer: AttentionLayer) -> None:
    sources = {origin(gemm.inputs[0]) for gemm in layer.gemms}
    tables = {tuple(part.rotary.inputs[1:3]) for part in (layer.q, layer.k)}
    positions = {laid_out(part.rotary.inputs[3]) for part in (layer.q, layer.k)}
    slots = {write.inputs[2] for write in (layer.k_write, layer.v_write)}
    if not len(sources) == len(tables) == len(positions) == len(slots) == 1:
        raise AssertionError(f"{stem(layer.q.gemm.inputs[1])}: Q, K and V of different inputs")


def _place_projections(graph: ir.Graph, layer: AttentionLayer) -> Any:
    """RmsQkvRope: rotated q [T, Hq, D] and the two written pools."""
    attention, rotary = layer.attention, layer.q.rotary
    q_heads, head_dim = static(attention.inputs[0], 1), static(attention.inputs[0], 2)
    pools = [layer.k_write.inputs[0], layer.v_write.inputs[0]]
    weight, bias = _joined_weights(graph, layer, head_dim)
    norms = _head_norms(layer)
    norm = _taken_norm(layer.q.gemm.inputs[0], norms)
    inputs: dict[str, ir.Value | None] = {"x": origin(layer.q.gemm.inputs[0])}
    if norm is not None:
        inputs = {"x": norm.x, "norm": as_bf16(norm.weight)}
    inputs |= {f"{name}_norm": as_bf16(of.weight) for name, of in norms.items()}
    of_all = [*norms.values(), *([norm] if norm else [])]
    inputs |= {
        "weight": weight,
        "bias": bias,
        "cos": as_fp32(rotary.inputs[1]),
        "sin": as_fp32(rotary.inputs[2]),
        "positions": laid_out(rotary.inputs[3]),
        "write_slot": layer.k_write.inputs[2],
        "k_pool": pools[0],
        "v_pool": pools[1],
    }
    return place(
        attention,
        "RmsQkvRope",
        inputs,
        [(ROWS, q_heads, head_dim), *[pool.shape for pool in pools if pool and pool.shape]],
        q_heads=q_heads,
        kv_heads=static(layer.k_write.inputs[1], 1),
        eps=of_all[0].eps if of_all else 0.0,
        rounding=norm.rounding if norm else "gpt_oss",
    )


def _head_norms(layer: AttentionLayer) -> dict[str, Norm]:
    """The norms of the heads of queries and keys, by ``q`` and ``k``; empty where there are none.

    AssertionError where only one has one, or the two are not LLaMA's of one eps.
    """
    nodes = {"q": layer.q.norm, "k": layer.k.norm}
    norms = {name: read_norm(node) for name, node in nodes.items() if node is not None}
    alike = len({norm.eps for norm in norms.values()}) <= 1
    if len(norms) == 1 or not alike or not all(norm.casts_first for norm in norms.values()):
        raise AssertionError(f"{stem(layer.q.gemm.inputs[1])}: heads of Q and K normed differently")
    return norms


def _taken_norm(x: ir.Value | None, head_norms: dict[str, Norm]) -> Norm | None:
    """The norm of projections that read ``x``; None where there is none, or another eps."""
    norm = norm_of(x)
    if norm is None or any(norm.eps != of.eps for of in head_norms.values()):
        return None
    return norm


def input_and_norm(x: ir.Value | None) -> tuple[dict[str, ir.Value | None], float]:
    """``x`` and ``norm`` of projections that read ``x`` and have no other norm, with its eps.

    The norm is taken in where it is GPT-OSS's; LLaMA's rounds elsewhere and stays a node.
    """
    norm = norm_of(x)
    if norm is None or norm.rounding != "gpt_oss":
        return {"x": origin(x)}, 0.0
    return {"x": norm.x, "norm": as_bf16(norm.weight)}, norm.eps


def _joined_weights(
    graph: ir.Graph, layer: AttentionLayer, head_dim: int
) -> tuple[ir.Value, ir.Value | None]:
    """Packed weight and bias of the three projections."""
    weights = [gemm.inputs[1] for gemm in layer.gemms]
    biases = [bias_of(gemm) for gemm in layer.gemms]
    name = f"{stem(weights[0]).removesuffix('q_proj')}qkv_proj"
    weight = packed(graph, f"{name}.packed", weights, partial(pack_qkv, head_dim=head_dim))
    if all(bias is None for bias in biases):
        return weight, None
    if None in biases:
        raise AssertionError(f"{name}: biases on some of Q, K and V only")
    pack_bias = partial(pack_qkv_bias, head_dim=head_dim)
    return weight, packed(graph, f"{name}.packed_bias", biases, pack_bias)


def _place_attention(graph: ir.Graph, old: ir.Node, q: ir.Value) -> None:
    """The attention again, over rotated ``q``, with fp32 sinks and the types of a CUDA engine."""
    op = op_named(old.op_type)
    given = [*old.inputs, *[None] * (len(op.inputs) - len(old.inputs))]
    inputs = {spec.name: value for spec, value in zip(op.inputs, given, strict=True)}
    inputs |= {"q": q, "sinks": as_fp32(inputs["sinks"])}
    attributes = {name: attribute.value for name, attribute in old.attributes.items()}
    width = static(old.outputs[0], 2)
    (attended,) = place(old, old.op_type, inputs, [(ROWS, static(q, 1), width)], **attributes)
    take_place(old.outputs[0], attended, graph)
