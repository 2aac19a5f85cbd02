"""Replaces norm, query and latent projections, rotation and cache write by RmsQueryLatent.

MlaAttention then reads the returned pool. Latents are padded with zeros to the kernels' widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.fusions.fused_node import (
    ROWS,
    as_fp32,
    packed,
    place,
    static,
    stem,
)
from specbuild.builder.backends.cuda.fusions.matching import bias_of, layout_origin, origin
from specbuild.builder.backends.cuda.fusions.qkv import input_and_norm
from specbuild.builder.graph.passes.attention_layers import Rotated, rotated_projection
from specbuild.builder.graph.passes.rewriting import producer, take_place
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_query_latent.packing import pack_query_bias, pack_query_latent
from specbuild.runtime.cache.layout import padded_width


@dataclass(frozen=True)
class _Layer:
    """The nodes around an ``MlaAttention`` that rebuilds keys."""

    attention: ir.Node
    write: ir.Node
    q: Rotated
    down: ir.Value  # W_c [hidden, latent]


def fuse_latent(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace one MlaAttention and the nodes before it."""
    layer = _match(node)
    if layer is None:
        return False
    latent, head_dim = static(layer.down, 1), static(node.inputs[0], 2)
    width = padded_width(latent)
    _widen_pool(layer.write.inputs[0], width)
    q, pool = _place_projections(graph, layer, head_dim, width)
    take_place(layer.write.outputs[0], pool, graph)
    _place_attention(graph, layer, q, pool, width)
    return True


def _match(node: ir.Node) -> _Layer | None:
    """Return the nodes of a layer, or None if they are not a projection, a rotation and a write."""
    if node.op_type != "MlaAttention":
        return None
    write = producer(node.inputs[1], "KvWrite")
    q = rotated_projection(node.inputs[0], layout_origin)
    matmul = None if write is None else producer(layout_origin(write.inputs[1]), "MatMul")
    if write is None or q is None or matmul is None or node.inputs[2] is None:
        return None
    if origin(matmul.inputs[0]) is not origin(q.gemm.inputs[0]):
        raise AssertionError(f"{stem(q.gemm.inputs[1])}: queries and latents of different inputs")
    down = matmul.inputs[1]
    assert down is not None
    return _Layer(node, write, q, down)


def _widen_pool(pool: ir.Value | None, width: int) -> None:
    assert pool is not None and pool.shape is not None
    pool.shape = ir.Shape([*list(pool.shape)[:3], width])


def _place_projections(
    graph: ir.Graph, layer: _Layer, head_dim: int, width: int
) -> tuple[ir.Value, ir.Value]:
    """Insert RmsQueryLatent and return rotated q [T, Hq, D] and the written pool."""
    gemm, rotary, pool = layer.q.gemm, layer.q.rotary, layer.write.inputs[0]
    assert pool is not None and pool.shape is not None
    name = f"{stem(gemm.inputs[1]).removesuffix('q_proj')}query_latent"

    def pack(q: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return pack_query_latent(q, _padded(down, width, axis=1), head_dim=head_dim)

    bias = bias_of(gemm)
    if bias is not None:
        pack_bias = partial(pack_query_bias, head_dim=head_dim, latent=width)
        bias = packed(graph, f"{name}.packed_bias", [bias], pack_bias)
    inputs, eps = input_and_norm(gemm.inputs[0])
    inputs |= {
        "weight": packed(graph, f"{name}.packed", [gemm.inputs[1], layer.down], pack),
        "bias": bias,
        "cos": as_fp32(rotary.inputs[1]),
        "sin": as_fp32(rotary.inputs[2]),
        "positions": layout_origin(rotary.inputs[3]),
        "write_slot": layer.write.inputs[2],
        "c_pool": pool,
    }
    heads = static(layer.attention.inputs[0], 1)
    q, written = place(
        layer.attention,
        "RmsQueryLatent",
        inputs,
        [(ROWS, heads, head_dim), pool.shape],
        q_heads=heads,
        eps=eps,
    )
    return q, written


def _place_attention(
    graph: ir.Graph, layer: _Layer, q: ir.Value, pool: ir.Value, width: int
) -> None:
    """Insert the attention again, with weights in the layout of kernels.

    Slots equal positions unless full-attention layers read views (SpecPV).
    """
    old = layer.attention
    op = op_named(old.op_type)
    old_inputs = [*old.inputs, *[None] * (len(op.inputs) - len(old.inputs))]
    inputs = {spec.name: value for spec, value in zip(op.inputs, old_inputs, strict=True)}
    for name in ("w_k", "w_v"):
        weight = layout_origin(inputs[name])
        shape = (-1, static(inputs[name], 1), static(inputs[name], 2))

        def widen(w: torch.Tensor, shape: tuple[int, ...] = shape) -> torch.Tensor:
            return _padded(w, width, axis=0).reshape(shape)

        inputs[name] = packed(graph, f"{stem(weight)}.by_head", [weight], widen)
    for name in ("b_k", "b_v"):
        bias = layout_origin(inputs[name])
        if bias is not None:
            biases = (static(inputs[name], 0), static(inputs[name], 1))
            by_head = partial(torch.reshape, shape=biases)
            inputs[name] = packed(graph, f"{stem(bias)}.by_head", [bias], by_head)
    unused = inputs["page_position"]
    if old.attributes["window"].value or not _has_views(graph):
        inputs["page_position"] = None
    inputs |= {
        "q": q,
        "c_pool": pool,
        "cos": as_fp32(inputs["cos"]),
        "sin": as_fp32(inputs["sin"]),
        "sinks": as_fp32(inputs["sinks"]),
    }
    attributes = {name: attribute.value for name, attribute in old.attributes.items()}
    sizes = (ROWS, static(q, 1), static(old.outputs[0], 2))
    (attended,) = place(old, old.op_type, inputs, [sizes], **attributes)
    take_place(old.outputs[0], attended, graph)
    graph.remove(old, safe=True)
    if unused is not None and not unused.uses() and unused in graph.inputs:
        graph.inputs.remove(unused)


def _has_views(graph: ir.Graph) -> bool:
    return any((value.name or "").endswith(".logical_pages") for value in graph.inputs)


def _padded(tensor: torch.Tensor, width: int, *, axis: int) -> torch.Tensor:
    """Append zeros to ``tensor`` along an axis, up to this size."""
    sizes = list(tensor.shape)
    sizes[axis] = width - sizes[axis]
    return torch.cat([tensor, tensor.new_zeros(sizes)], dim=axis)
