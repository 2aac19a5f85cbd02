"""Replaces the nodes around an MlaAttention with absorbed queries by RmsLowRank and AbsorbQuery.

The second projection of queries remains a Gemm between the two. Cache entries are padded with zeros
to the kernels' widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import torch

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
    layout_origin,
    linear_of,
    norm_of,
    origin,
    origin_node,
)
from specbuild.builder.graph.passes.rewriting import constant_array, producer, take_place
from specbuild.plugins_cuda.absorb_query.packing import pack_absorbed
from specbuild.plugins_cuda.linear.packing import pack_rows
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.cache.layout import padded_width


@dataclass(frozen=True)
class _Layer:
    """The nodes around an ``MlaAttention`` with absorbed queries.

    ``query`` is the Gemm of the heads' queries. It reads x or ``query_norm``, the norm of
    ``query_down``. ``entry`` is the Gemm of W_kv_a, whose latent ``latent_norm`` normalizes.
    """

    attention: ir.Node
    write: ir.Node
    query: ir.Node
    query_down: ir.Node | None
    query_norm: Norm | None
    entry: ir.Node
    latent_norm: Norm
    key_rotary: ir.Node
    w_uk: ir.Value

    @property
    def first_query(self) -> ir.Node:
        """The Gemm of the queries' path that reads x."""
        return self.query if self.query_down is None else self.query_down

    @property
    def entry_width(self) -> int:
        """The padded width of a cache entry."""
        return padded_width(static(self.entry.inputs[1], 0))


def fuse_low_rank(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace one MlaAttention and the nodes before it, except the second query projection."""
    layer = _match(node)
    if layer is None:
        return False
    _require_consistent(layer)
    pool = layer.write.inputs[0]
    assert pool is not None and pool.shape is not None
    pool.shape = ir.Shape([*list(pool.shape)[:3], layer.entry_width])
    projected, written = _place_projections(graph, layer, pool)
    take_place(layer.write.outputs[0], written, graph)
    if layer.query_down is None:
        take_place(layer.query.outputs[0], projected, graph)
    else:
        layer.query.replace_input_with(0, projected)
        projected = layer.query.outputs[0]
    _place_attention(graph, layer, _place_absorbed(graph, layer, projected), written)
    return True


def _match(node: ir.Node) -> _Layer | None:
    """Return the nodes of MLA as in ``builder/families/parts/mla.py``, or None for other nodes."""
    if node.op_type != "MlaAttention" or node.inputs[2] is not None:
        return None
    write, query = producer(node.inputs[1], "KvWrite"), origin_node(node.inputs[0], "Concat")
    entry = None if write is None else producer(layout_origin(write.inputs[1]), "Concat")
    if write is None or query is None or entry is None:
        return None
    absorption = _absorbed(query.inputs[0])
    rotary, rope_part = _rotated(query.inputs[1])
    latent_norm, (key_rotary, key) = norm_of(entry.inputs[0]), _rotated(entry.inputs[1])
    if absorption is None or latent_norm is None or rotary is None or key_rotary is None:
        return None
    nope, w_uk = absorption
    query_gemm, entry_gemm = _both_parts(nope, rope_part), _both_parts(latent_norm.x, key)
    if query_gemm is None or entry_gemm is None:
        return None
    # If both read the same input, it is the layer's input and not a query latent. The input itself
    # can be a projection, as in MTP layers.
    reads_layer_input = origin(query_gemm.inputs[0]) is origin(entry_gemm.inputs[0])
    query_norm = None if reads_layer_input else norm_of(query_gemm.inputs[0])
    down = None if query_norm is None else linear_of(query_norm.x)
    return _Layer(
        node, write, query_gemm, down, None if down is None else query_norm,
        entry_gemm, latent_norm, key_rotary, w_uk,
    )  # fmt: skip


def _absorbed(value: ir.Value | None) -> tuple[ir.Value | None, ir.Value] | None:
    """Return queries [T, h, nope] and W_uk [h, nope, rank] of ``(qᵀ W_uk)ᵀ``."""
    outer = origin_node(value, "Transpose")
    product = None if outer is None else origin_node(outer.inputs[0], "MatMul")
    inner = None if product is None else origin_node(product.inputs[0], "Transpose")
    if product is None or inner is None or product.inputs[1] is None:
        return None
    return inner.inputs[0], product.inputs[1]


def _rotated(value: ir.Value | None) -> tuple[ir.Node | None, ir.Value | None]:
    """Return the rotation that produces ``value``, and its input; None if there is none."""
    value = layout_origin(value)
    squeeze = producer(value, "Squeeze")
    rotary = producer(layout_origin(squeeze.inputs[0]) if squeeze else value, "RotaryEmbedding")
    return rotary, None if rotary is None else layout_origin(rotary.inputs[0])


def _both_parts(first: ir.Value | None, second: ir.Value | None) -> ir.Node | None:
    """Return the Gemm whose columns, or heads' columns, are split to ``first`` and ``second``."""
    parts = [producer(layout_origin(value), "SequenceAt") for value in (first, second)]
    splits = []
    for index, part in enumerate(parts):
        position = None if part is None else constant_array(part.inputs[1])
        if part is None or position is None or position != index:
            return None
        splits.append(producer(part.inputs[0], "SplitToSequence"))
    split = splits[0]
    return linear_of(split.inputs[0]) if split is not None and split is splits[1] else None


def _require_consistent(layer: _Layer) -> None:
    """Raise AssertionError if the nodes of a layer do not belong together."""
    name = stem(layer.entry.inputs[1])
    if origin(layer.entry.inputs[0]) is not origin(layer.first_query.inputs[0]):
        raise AssertionError(f"{name}: queries and latents have different inputs")
    norms = [norm for norm in (layer.latent_norm, layer.query_norm) if norm is not None]
    if len({norm.eps for norm in norms}) > 1 or not all(norm.casts_first for norm in norms):
        raise AssertionError(f"{name}: the norms of query and latent must be LLaMA's with one eps")
    if any(bias_of(gemm) is not None for gemm in (layer.entry, layer.first_query)):
        raise AssertionError(f"{name}: low-rank projections with biases are not supported")


def _place_projections(graph: ir.Graph, layer: _Layer, pool: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Insert RmsLowRank and return the inputs of queries [T, Nq] and the written pool."""
    first, rotary = layer.first_query, layer.key_rotary
    assert pool.shape is not None
    weights = [first.inputs[1], layer.entry.inputs[1]]
    name = f"{stem(weights[1]).removesuffix('kv_a_proj_with_mqa')}low_rank"
    norm = norm_of(layer.entry.inputs[0])
    inputs: dict[str, ir.Value | None] = {"x": origin(layer.entry.inputs[0])}
    if norm is not None:
        inputs = {"x": norm.x, "norm": as_bf16(norm.weight)}
    inputs |= {
        "weight": packed(graph, f"{name}.packed", weights, lambda *w: pack_rows(torch.cat(w))),
        "q_norm": None if layer.query_norm is None else as_bf16(layer.query_norm.weight),
        "latent_norm": as_bf16(layer.latent_norm.weight),
        "cos": as_fp32(rotary.inputs[1]),
        "sin": as_fp32(rotary.inputs[2]),
        "positions": layout_origin(rotary.inputs[3]),
        "write_slot": layer.write.inputs[2],
        "c_pool": pool,
    }
    q, written = place(
        layer.query,
        "RmsLowRank",
        inputs,
        [(ROWS, static(first.inputs[1], 0)), pool.shape],
        latent_eps=layer.latent_norm.eps,
        **{"eps": 0.0} if norm is None else {"eps": norm.eps, "rounding": norm.rounding},
    )
    return q, written


def _place_absorbed(graph: ir.Graph, layer: _Layer, q: ir.Value) -> ir.Value:
    """Insert AbsorbQuery and return queries in the space of cache entries [T, h, entry]."""
    heads, entry, rotary = static(layer.w_uk, 0), layer.entry_width, layer.key_rotary
    inputs = {
        "q": q,
        "weight": packed(graph, f"{stem(layer.w_uk)}.packed", [layer.w_uk], pack_absorbed),
        "cos": as_fp32(rotary.inputs[1]),
        "sin": as_fp32(rotary.inputs[2]),
        "positions": layout_origin(rotary.inputs[3]),
    }
    (absorbed,) = place(
        layer.attention,
        "AbsorbQuery",
        inputs,
        [(ROWS, heads, entry)],
        q_heads=heads,
        entry=entry,
    )
    return absorbed


def _place_attention(graph: ir.Graph, layer: _Layer, q: ir.Value, pool: ir.Value) -> None:
    """Insert the attention again, with weights of values [rank, h, v] in the layout of kernels."""
    old = layer.attention
    op = op_named(old.op_type)
    old_inputs = [*old.inputs, *[None] * (len(op.inputs) - len(old.inputs))]
    inputs = {spec.name: value for spec, value in zip(op.inputs, old_inputs, strict=True)}
    transposed = origin_node(inputs["w_v"], "Transpose")
    assert transposed is not None
    w_uv = transposed.inputs[0]

    def by_latent(weight: torch.Tensor) -> torch.Tensor:
        return weight.permute(2, 0, 1).contiguous()

    inputs |= {
        "q": q,
        "c_pool": pool,
        "w_v": packed(graph, f"{stem(w_uv)}.by_latent", [w_uv], by_latent),
    }
    attributes = {name: attribute.value for name, attribute in old.attributes.items()}
    sizes = (ROWS, static(q, 1), static(old.outputs[0], 2))
    (attended,) = place(old, old.op_type, inputs, [sizes], **attributes)
    take_place(old.outputs[0], attended, graph)
    graph.remove(old, safe=True)
