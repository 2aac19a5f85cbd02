"""Replaces norm, Q, K and V projections, rotation and cache writes of a layer by RmsQkvRope.

The attention then reads the returned pools. Keys and values that are written without an attention
become an RmsQkvRope without queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import onnx_ir as ir
import torch
from torch.nn import functional as F

from specbuild.builder.backends.cuda.fusions.fused_node import (
    ROWS,
    as_bf16,
    as_fp32,
    packed,
    packed_rows,
    place,
    static,
    stem,
)
from specbuild.builder.backends.cuda.fusions.growth import Growth, query_growth
from specbuild.builder.backends.cuda.fusions.matching import (
    Norm,
    bias_of,
    layout_origin,
    norm_of,
    origin,
    read_norm,
)
from specbuild.builder.graph.passes.attention_layers import (
    Rotated,
    attention_layer,
    rotated_projection,
)
from specbuild.builder.graph.passes.rewriting import attribute, producer, take_place
from specbuild.builder.graph.passes.weights import derive
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_qkv_rope.packing import join_qkv


@dataclass(frozen=True)
class _Projections:
    """The projections of one input: queries, keys and values, or a part of these.

    ``pools`` are those of keys and values before ``writes``. A layer that reads the keys and values
    of another layer has no writes.
    """

    q: Rotated | None
    k: Rotated | None
    v_gemm: ir.Node | None
    pools: tuple[ir.Value | None, ...]
    write_slot: ir.Value | None
    writes: tuple[ir.Node, ...] = ()
    v_norm: ir.Node | None = None

    @property
    def rotated(self) -> dict[str, Rotated]:
        """The rotated projections, by ``q`` and ``k``."""
        return {name: part for name, part in (("q", self.q), ("k", self.k)) if part is not None}

    @property
    def last(self) -> Rotated:
        """The keys, or the queries if there are no keys; weights are named after it."""
        return [*self.rotated.values()][-1]

    @property
    def gemms(self) -> tuple[ir.Node, ...]:
        """The projections, values last."""
        values = () if self.v_gemm is None else (self.v_gemm,)
        return *(part.gemm for part in self.rotated.values()), *values

    @property
    def kv_heads(self) -> int:
        """The number of heads of the written keys."""
        return static(self.writes[0].inputs[1], 1) if self.writes else 0


def _written(
    q: Rotated | None, k: Rotated, v_gemm: ir.Node, writes: tuple[ir.Node, ir.Node],
    v_norm: ir.Node | None = None,
) -> _Projections:  # fmt: skip
    """Return projections whose keys and values go to the pools of two ``KvWrite``."""
    slots = {write.inputs[2] for write in writes}
    if len(slots) != 1:
        raise AssertionError(f"{stem(k.gemm.inputs[1])}: K and V have different slots")
    pools = tuple(write.inputs[0] for write in writes)
    return _Projections(q, k, v_gemm, pools, writes[0].inputs[2], writes, v_norm)


def fuse_qkv(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace one PagedTreeAttention and the nodes before it, including norms of heads."""
    if node.op_type != "PagedTreeAttention":
        return False
    growth = query_growth(node.inputs[0])
    if growth is not None:
        growth.product.replace_all_uses_with(growth.queries)
    layer = attention_layer(node, layout_origin, head_norms=True)
    projections = _queries(node) if layer is None else None
    if layer is not None:
        writes = (layer.k_write, layer.v_write)
        projections = _written(layer.q, layer.k, layer.v_gemm, writes, layer.v_norm)
    if projections is None:
        return False
    q = _place_projections(graph, node, projections, static(node.inputs[0], 1), growth)
    # Other readers of the rotated queries, such as SpecPV's block selection, follow the attention.
    for user, index in [*node.inputs[0].uses()] if node.inputs[0] is not None else []:
        if user is not node:
            user.replace_input_with(index, q)
    _place_attention(graph, node, q)
    return True


def _queries(attention: ir.Node) -> _Projections | None:
    """Return the queries of a layer that writes no keys, or None.

    It reads the pools of an earlier layer, or in a draft those of the target.
    """
    q = rotated_projection(attention.inputs[0], layout_origin, head_norms=True)
    slot = _slot_of(attention)
    if q is None or slot is None:
        return None
    return _Projections(q, None, None, (attention.inputs[1], attention.inputs[2]), slot)


def _slot_of(attention: ir.Node) -> ir.Value | None:
    """Return the write slots of the pools that an attention reads, or None if its layer writes."""
    pool, graph = attention.inputs[1], attention.graph
    assert pool is not None and pool.name is not None and isinstance(graph, ir.Graph)
    writer = producer(pool, "RmsQkvRope")
    if writer is not None:
        names = [spec.name for spec in op_named("RmsQkvRope").inputs]
        return writer.inputs[names.index("write_slot")]
    name = f"{pool.name.partition('.')[0]}.write_slot"
    is_input = any(value is pool for value in graph.inputs)
    return next((v for v in graph.inputs if is_input and v.name == name), None)


def fuse_context(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace the writes of a layer's keys and values that no attention reads."""
    if node.op_type != "KvWrite":
        return False
    k = rotated_projection(node.inputs[1], layout_origin, head_norms=True)
    v_write = None if k is None else _matching_value_write(graph, node)
    v_gemm = None if v_write is None else producer(layout_origin(v_write.inputs[1]), "Gemm")
    if k is None or v_write is None or v_gemm is None:
        return False
    _place_projections(graph, v_write, _written(None, k, v_gemm, (node, v_write)), 0)
    return True


def _matching_value_write(graph: ir.Graph, k_write: ir.Node) -> ir.Node | None:
    """Return the write of the values for these keys, by the name of its pool."""
    pool = k_write.inputs[0]
    assert pool is not None and pool.name is not None
    name = f"{pool.name.removesuffix('k_pool')}v_pool"
    return next(
        (
            node
            for node in graph
            if node.op_type == "KvWrite" and node.inputs[0] and node.inputs[0].name == name
        ),
        None,
    )


def _require_one_input(projections: _Projections) -> None:
    sources = {origin(gemm.inputs[0]) for gemm in projections.gemms}
    rotaries = [part.rotary for part in projections.rotated.values()]
    tables = {tuple(rotary.inputs[1:3]) for rotary in rotaries}
    positions = {layout_origin(rotary.inputs[3]) for rotary in rotaries}
    if not len(sources) == len(tables) == len(positions) == 1:
        raise AssertionError(
            f"{stem(projections.last.gemm.inputs[1])}: Q, K and V have different inputs"
        )


def _place_projections(
    graph: ir.Graph,
    before: ir.Node,
    projections: _Projections,
    q_heads: int,
    growth: Growth | None = None,
) -> ir.Value:
    """Insert RmsQkvRope before a node, replace the pools, and return rotated q [T, Hq, D]."""
    _require_one_input(projections)
    rotary, pools = projections.last.rotary, projections.pools
    width = static(pools[0], 3)
    rotary_dim = _rotary_dim(rotary, width)
    weight, bias = _joined_weights(graph, projections, width, rotary_dim)
    norms = _head_norms(projections)
    x = projections.last.gemm.inputs[0]
    norm = _input_norm(x, norms)
    inputs: dict[str, ir.Value | None] = {"x": origin(x)}
    if norm is not None:
        inputs = {"x": norm.x, "norm": as_bf16(norm.weight)}
    inputs |= {
        f"{name}_norm": _reordered_norm(graph, head_norm.weight, width, rotary_dim)
        for name, head_norm in norms.items()
    }
    all_norms = [*norms.values(), *([norm] if norm else [])]
    cos = _full_table(graph, rotary.inputs[1], width, 1.0)
    positions = static(cos, 0)
    if growth is not None:
        cos = growth.append_to(graph, cos)
    inputs |= {
        "weight": weight,
        "bias": bias,
        "cos": cos,
        "sin": _full_table(graph, rotary.inputs[2], width, 0.0),
        "positions": layout_origin(rotary.inputs[3]),
        "write_slot": projections.write_slot,
        "k_pool": pools[0],
        "v_pool": pools[1],
    }
    q, *written = place(
        before,
        "RmsQkvRope",
        inputs,
        [(ROWS, q_heads, width), *[pool.shape for pool in pools if pool and pool.shape]],
        q_heads=q_heads,
        kv_heads=projections.kv_heads,
        eps=all_norms[0].eps if all_norms else 0.0,
        rounding=norm.rounding if norm else "gpt_oss",
        head_rounding=next(iter(norms.values())).rounding if norms else "llama",
        value_norm=int(_norms_values(projections, norms)),
        growth=0 if growth is None else positions,
    )
    for write, pool in zip(projections.writes, written, strict=False):
        take_place(write.outputs[0], pool, graph)
    return q


def _head_norms(projections: _Projections) -> dict[str, Norm]:
    """Return the norms of query and key heads, by ``q`` and ``k``; empty if there are none.

    AssertionError if only one has a norm, or they differ in rounding or eps.
    """
    nodes = {name: part.norm for name, part in projections.rotated.items()}
    norms = {name: read_norm(node) for name, node in nodes.items() if node is not None}
    kinds = {(norm.eps, norm.rounding) for norm in norms.values()}
    if len(kinds) > 1 or len(norms) not in (0, len(nodes)):
        raise AssertionError(
            f"{stem(projections.last.gemm.inputs[1])}: the head norms of Q and K differ"
        )
    return norms


def _norms_values(projections: _Projections, norms: dict[str, Norm]) -> bool:
    """Return whether values are divided by their root mean square, as normed keys are.

    AssertionError if that norm has a weight or another eps.
    """
    if projections.v_norm is None:
        return False
    weight = producer(origin(projections.v_norm.inputs[1]), "ConstantOfShape")
    eps = attribute(projections.v_norm, "epsilon", 1e-5)
    filled = None if weight is None else weight.attributes.get("value")
    is_one = filled is not None and float(filled.as_tensor().numpy().item()) == 1
    if not is_one or any(eps != norm.eps for norm in norms.values()):
        name = stem(projections.last.gemm.inputs[1])
        raise AssertionError(f"{name}: the norm of values has a weight or another eps")
    return True


def _input_norm(x: ir.Value | None, head_norms: dict[str, Norm]) -> Norm | None:
    """Return the norm of ``x`` before projections, or None if it is absent or has another eps."""
    norm = norm_of(x)
    if norm is None or any(norm.eps != head_norm.eps for head_norm in head_norms.values()):
        return None
    return norm


def input_and_norm(x: ir.Value | None) -> tuple[dict[str, ir.Value | None], float]:
    """Return the inputs ``x`` and ``norm`` of projections of ``x``, and the norm's eps.

    A GPT-OSS norm is fused. LLaMA's norm rounds at another point and stays a separate node.
    """
    norm = norm_of(x)
    if norm is None or norm.rounding != "gpt_oss":
        return {"x": origin(x)}, 0.0
    return {"x": norm.x, "norm": as_bf16(norm.weight)}, norm.eps


def _joined_weights(
    graph: ir.Graph, projections: _Projections, head_dim: int, rotary_dim: int
) -> tuple[ir.Value, ir.Value | None]:
    """Return packed weight and bias of the projections; ``rotary_dim`` values of a head rotate."""
    weights = [gemm.inputs[1] for gemm in projections.gemms]
    biases = [bias_of(gemm) for gemm in projections.gemms]
    rotated = "".join(projections.rotated)
    prefix = stem(projections.last.gemm.inputs[1]).removesuffix(f"{rotated[-1]}_proj")
    name = f"{prefix}{rotated}{'' if projections.v_gemm is None else 'v'}_proj"
    join = partial(_join, rotated=len(rotated), head_dim=head_dim, rotary_dim=rotary_dim)
    weight = packed_rows(graph, f"{name}.packed", weights, join)
    if all(bias is None for bias in biases):
        return weight, None
    if None in biases:
        raise AssertionError(f"{name}: only some of Q, K and V have a bias")
    return weight, packed(graph, f"{name}.packed_bias", biases, join)


def _rotary_dim(rotary: ir.Node, width: int) -> int:
    """Return how many values of a head are rotated."""
    return int(attribute(rotary, "rotary_embedding_dim", 0)) or width


def _head_order(width: int, rotary_dim: int) -> list[int]:
    """Return an order of a head's values in which values i and i + width/2 are rotated together.

    The other values fill both halves and are rotated by 0. Scores do not depend on the order.
    """
    half, unrotated = rotary_dim // 2, (width - rotary_dim) // 2
    first, second = [*range(half)], [*range(half, rotary_dim)]
    return [
        *first,
        *range(rotary_dim, rotary_dim + unrotated),
        *second,
        *range(rotary_dim + unrotated, width),
    ]


def _join(*parts: torch.Tensor, rotated: int, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Apply ``join_qkv`` to projections, the first ``rotated`` of them in :func:`_head_order`."""
    order = _head_order(head_dim, rotary_dim)
    turned = parts[:rotated]
    reordered = [part.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1) for part in turned]
    return join_qkv(*reordered, *parts[rotated:], head_dim=head_dim)


def _reordered_norm(
    graph: ir.Graph, weight: ir.Value, width: int, rotary_dim: int
) -> ir.Value | None:
    """Return the weight of a head norm, or a norm of all heads, in :func:`_head_order`."""
    order = _head_order(width, rotary_dim)
    norm = as_bf16(weight)
    if order == list(range(width)):
        return norm

    def ordered(w: torch.Tensor) -> torch.Tensor:
        return w.unflatten(0, (-1, width))[:, order].flatten()

    return packed(graph, f"{stem(weight)}.in_order", [norm], ordered)


def _full_table(
    graph: ir.Graph, table: ir.Value | None, width: int, value: float
) -> ir.Value | None:
    """Return cosines or sines for full heads, padded with ``value`` for unrotated pairs."""
    stored_table = as_fp32(table)
    missing = width // 2 - static(stored_table, 1)
    if not missing:
        return stored_table
    assert stored_table is not None
    return derive(
        graph,
        f"{stored_table.name}.whole",
        [stored_table],
        lambda t: F.pad(t, (0, missing), value=value),
    )


def _place_attention(graph: ir.Graph, old: ir.Node, q: ir.Value) -> None:
    """Insert the attention again with rotated ``q``, fp32 sinks and the types of a CUDA engine."""
    op = op_named(old.op_type)
    old_inputs = [*old.inputs, *[None] * (len(op.inputs) - len(old.inputs))]
    inputs = {spec.name: value for spec, value in zip(op.inputs, old_inputs, strict=True)}
    inputs |= {"q": q, "sinks": as_fp32(inputs["sinks"])}
    attributes = {name: attribute.value for name, attribute in old.attributes.items()}
    width = static(old.outputs[0], 2)
    (attended,) = place(old, old.op_type, inputs, [(ROWS, static(q, 1), width)], **attributes)
    take_place(old.outputs[0], attended, graph)
