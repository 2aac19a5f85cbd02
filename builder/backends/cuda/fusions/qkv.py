"""Norm, Q, K and V projections, rotation and cache writing of a layer become RmsQkvRope.

The attention then reads the pools that it gives. Keys and values that a graph writes without
attending to them are one without queries.
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
    laid_out,
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
    """What a layer makes of one input: queries where it has some, and what goes to its pools."""

    q: Rotated | None
    k: Rotated
    v_gemm: ir.Node
    k_write: ir.Node
    v_write: ir.Node
    v_norm: ir.Node | None = None

    @property
    def rotated(self) -> dict[str, Rotated]:
        """What turns, by ``q`` and ``k``."""
        return {"k": self.k} if self.q is None else {"q": self.q, "k": self.k}

    @property
    def gemms(self) -> tuple[ir.Node, ...]:
        """The projections, values last."""
        return *(part.gemm for part in self.rotated.values()), self.v_gemm

    @property
    def writes(self) -> tuple[ir.Node, ir.Node]:
        """Those of keys and of values."""
        return self.k_write, self.v_write


def fuse_qkv(graph: ir.Graph, node: ir.Node) -> bool:
    """Rewrites one PagedTreeAttention and what stands in front of it, norms of heads included."""
    if node.op_type != "PagedTreeAttention":
        return False
    growth = query_growth(node.inputs[0])
    if growth is not None:
        growth.product.replace_all_uses_with(growth.queries)
    layer = attention_layer(node, laid_out, head_norms=True)
    if layer is None:
        return False
    made = _Projections(layer.q, layer.k, layer.v_gemm, layer.k_write, layer.v_write, layer.v_norm)
    q = _place_projections(graph, node, made, static(node.inputs[0], 1), growth)
    # What else reads the rotated queries (SpecPV's choice of blocks) stands behind the attention.
    for user, index in [*node.inputs[0].uses()] if node.inputs[0] is not None else []:
        if user is not node:
            user.replace_input_with(index, q)
    _place_attention(graph, node, q)
    return True


def fuse_context(graph: ir.Graph, node: ir.Node) -> bool:
    """Rewrites the writes of a layer's keys and values where no attention stands behind them."""
    if node.op_type != "KvWrite":
        return False
    k = rotated_projection(node.inputs[1], laid_out, head_norms=True)
    v_write = None if k is None else _values_beside(graph, node)
    v_gemm = None if v_write is None else producer(laid_out(v_write.inputs[1]), "Gemm")
    if k is None or v_write is None or v_gemm is None:
        return False
    _place_projections(graph, v_write, _Projections(None, k, v_gemm, node, v_write), 0)
    return True


def _values_beside(graph: ir.Graph, k_write: ir.Node) -> ir.Node | None:
    """The write of the values that belong to these keys: its pool is named after theirs."""
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


def _require_one_input(made: _Projections) -> None:
    sources = {origin(gemm.inputs[0]) for gemm in made.gemms}
    rotaries = [part.rotary for part in made.rotated.values()]
    tables = {tuple(rotary.inputs[1:3]) for rotary in rotaries}
    positions = {laid_out(rotary.inputs[3]) for rotary in rotaries}
    slots = {write.inputs[2] for write in made.writes}
    if not len(sources) == len(tables) == len(positions) == len(slots) == 1:
        raise AssertionError(f"{stem(made.k.gemm.inputs[1])}: Q, K and V of different inputs")


def _place_projections(
    graph: ir.Graph,
    before: ir.Node,
    made: _Projections,
    q_heads: int,
    growth: Growth | None = None,
) -> ir.Value:
    """RmsQkvRope in front of a node: rotated q [T, Hq, D]; the written pools take their places."""
    _require_one_input(made)
    rotary, width = made.k.rotary, static(made.k_write.inputs[1], 2)
    turned = _turned(rotary, width)
    pools = [write.inputs[0] for write in made.writes]
    weight, bias = _joined_weights(graph, made, width, turned)
    norms = _head_norms(made)
    x = made.k.gemm.inputs[0]
    norm = _taken_norm(x, norms)
    inputs: dict[str, ir.Value | None] = {"x": origin(x)}
    if norm is not None:
        inputs = {"x": norm.x, "norm": as_bf16(norm.weight)}
    inputs |= {
        f"{name}_norm": _in_order(graph, of.weight, width, turned) for name, of in norms.items()
    }
    of_all = [*norms.values(), *([norm] if norm else [])]
    cos = _whole_table(graph, rotary.inputs[1], width, 1.0)
    positions = static(cos, 0)
    if growth is not None:
        cos = growth.behind(graph, cos)
    inputs |= {
        "weight": weight,
        "bias": bias,
        "cos": cos,
        "sin": _whole_table(graph, rotary.inputs[2], width, 0.0),
        "positions": laid_out(rotary.inputs[3]),
        "write_slot": made.k_write.inputs[2],
        "k_pool": pools[0],
        "v_pool": pools[1],
    }
    q, *written = place(
        before,
        "RmsQkvRope",
        inputs,
        [(ROWS, q_heads, width), *[pool.shape for pool in pools if pool and pool.shape]],
        q_heads=q_heads,
        kv_heads=static(made.k_write.inputs[1], 1),
        eps=of_all[0].eps if of_all else 0.0,
        rounding=norm.rounding if norm else "gpt_oss",
        head_rounding=next(iter(norms.values())).rounding if norms else "llama",
        value_norm=int(_norms_values(made, norms)),
        growth=0 if growth is None else positions,
    )
    for write, pool in zip(made.writes, written, strict=True):
        take_place(write.outputs[0], pool, graph)
    return q


def _head_norms(made: _Projections) -> dict[str, Norm]:
    """The norms of the heads of queries and keys, by ``q`` and ``k``; empty where there are none.

    AssertionError where only one has one, or the two differ in kind or eps.
    """
    nodes = {name: part.norm for name, part in made.rotated.items()}
    norms = {name: read_norm(node) for name, node in nodes.items() if node is not None}
    kinds = {(norm.eps, norm.rounding) for norm in norms.values()}
    if len(kinds) > 1 or len(norms) not in (0, len(nodes)):
        raise AssertionError(f"{stem(made.k.gemm.inputs[1])}: heads of Q and K normed differently")
    return norms


def _norms_values(made: _Projections, norms: dict[str, Norm]) -> bool:
    """Whether values are divided by their root mean square, as keys are that are normed.

    AssertionError where that has a weight, or another eps.
    """
    if made.v_norm is None:
        return False
    weight = producer(origin(made.v_norm.inputs[1]), "ConstantOfShape")
    eps = attribute(made.v_norm, "epsilon", 1e-5)
    filled = None if weight is None else weight.attributes.get("value")
    one = filled is not None and float(filled.as_tensor().numpy().item()) == 1
    if not one or any(eps != norm.eps for norm in norms.values()):
        raise AssertionError(f"{stem(made.k.gemm.inputs[1])}: values normed by a weight or eps")
    return True


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
    graph: ir.Graph, made: _Projections, head_dim: int, turned: int
) -> tuple[ir.Value, ir.Value | None]:
    """Packed weight and bias of the projections; ``turned`` values of a head turn."""
    weights = [gemm.inputs[1] for gemm in made.gemms]
    biases = [bias_of(gemm) for gemm in made.gemms]
    joined = "kv_proj" if made.q is None else "qkv_proj"
    name = f"{stem(made.k.gemm.inputs[1]).removesuffix('k_proj')}{joined}"
    join = partial(_join, head_dim=head_dim, turned=turned)
    weight = packed_rows(graph, f"{name}.packed", weights, join)
    if all(bias is None for bias in biases):
        return weight, None
    if None in biases:
        raise AssertionError(f"{name}: biases on some of Q, K and V only")
    return weight, packed(graph, f"{name}.packed_bias", biases, join)


def _turned(rotary: ir.Node, width: int) -> int:
    """How many values of a head turn."""
    return int(attribute(rotary, "rotary_embedding_dim", 0)) or width


def _head_order(width: int, turned: int) -> list[int]:
    """A head's values in an order in which those i and i + width/2 turn together.

    The others follow in both halves; they turn by no angle. Scores do not depend on the order.
    """
    half, rest = turned // 2, (width - turned) // 2
    first, second = [*range(half)], [*range(half, turned)]
    return [*first, *range(turned, turned + rest), *second, *range(turned + rest, width)]


def _join(*parts: torch.Tensor, head_dim: int, turned: int) -> torch.Tensor:
    """``join_qkv`` of projections, values last, with the rows of heads that turn in their order."""
    order = _head_order(head_dim, turned)
    *rotated, values = parts
    inner = [part.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1) for part in rotated]
    return join_qkv(*inner, values, head_dim=head_dim)


def _in_order(graph: ir.Graph, weight: ir.Value, width: int, turned: int) -> ir.Value | None:
    """The weight of a norm of heads, or of all together, in the order of their values."""
    order = _head_order(width, turned)
    plain = as_bf16(weight)
    if order == list(range(width)):
        return plain

    def ordered(w: torch.Tensor) -> torch.Tensor:
        return w.unflatten(0, (-1, width))[:, order].flatten()

    return packed(graph, f"{stem(weight)}.in_order", [plain], ordered)


def _whole_table(
    graph: ir.Graph, table: ir.Value | None, width: int, value: float
) -> ir.Value | None:
    """Cosines or sines of whole heads: ``value`` where nothing turns."""
    known = as_fp32(table)
    missing = width // 2 - static(known, 1)
    if not missing:
        return known
    assert known is not None
    return derive(
        graph, f"{known.name}.whole", [known], lambda t: F.pad(t, (0, missing), value=value)
    )


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
