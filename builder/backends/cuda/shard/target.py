"""The pass that converts a target's fused graph to that of a rank (Megatron-LM, arXiv 1909.08053).

Projections to heads and inner widths compute a rank's share of rows and need no exchange.
Projections back to the hidden width multiply a rank's share of columns. Their fp32 partial sums are
added over the ranks, in rank order, before bias and residual. Everything else is replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.fusions.fused_node import ROWS, Sizes, place, static, stem
from specbuild.builder.backends.cuda.shard.split import (
    by_columns,
    by_heads,
    by_middle_axis,
    by_rows,
    expert_down,
    expert_gate_up,
    expert_gate_up_bias,
    first_rows_by_rank,
    only_first,
)
from specbuild.builder.backends.cuda.step.state import EXCHANGE
from specbuild.builder.graph.passes.cleanup import remove_unused
from specbuild.builder.graph.passes.rewriting import take_place
from specbuild.builder.graph.passes.weights import derive_shards
from specbuild.plugins_cuda.linear.packing import TILE_ROWS
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine_dir.ranks import heads_of_rank
from specbuild.runtime.errors import SpecbuildError

# Ops whose output rows contain only a rank's share of the next projection's input.
_SHARDED_ROWS = ("PagedTreeAttention", "MlaAttention", "RmsSwiglu")

Split = Callable[[torch.Tensor], torch.Tensor]


def shard_target(model: ir.Model, *, ranks: int) -> int:
    """Rewrite the nodes of a target's graph for one of ``ranks`` ranks, and return their number."""
    graph = model.graph
    exchange = _exchange_inputs(graph, ranks)
    changed = 0
    for node in list(graph):
        rewrite = _RULES.get(node.op_type)
        if rewrite is not None:
            changed += rewrite(_Node(graph, node, ranks, exchange))
    remove_unused(model)
    return changed


@dataclass(frozen=True)
class _Node:
    """A node to be rewritten, with the functions that replace it."""

    graph: ir.Graph
    node: ir.Node
    ranks: int
    exchange: dict[str, ir.Value | None]

    @property
    def inputs(self) -> dict[str, ir.Value | None]:
        """The inputs by declared name."""
        names = [spec.name for spec in op_named(self.node.op_type).inputs]
        values = [*self.node.inputs, *[None] * (len(names) - len(self.node.inputs))]
        return dict(zip(names, values, strict=True))

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes as Python values."""
        return {name: attribute.value for name, attribute in self.node.attributes.items()}

    def shards(self, name: str, split: Split) -> ir.Value | None:
        """Return the parts of the weight at this input, or None if it is absent."""
        value = self.inputs[name]
        return None if value is None else derive_shards(self.graph, value, self.ranks, split)

    def replace_with(
        self, inputs: dict[str, ir.Value | None], *sizes: Sizes | ir.Shape, **attributes: Any
    ) -> None:
        """Replace the node by the same op with other inputs, attributes and output sizes."""
        kind, all_attributes = self.node.op_type, {**self.attributes, **attributes}
        outputs = place(self.node, kind, {**self.inputs, **inputs}, sizes, **all_attributes)
        for old, new in zip(self.node.outputs, outputs, strict=True):
            take_place(old, new, self.graph)

    def replace_with_exchange(
        self, kind: str, inputs: dict[str, ir.Value | None], **attributes: Any
    ) -> None:
        """Replace the node by an op that exchanges data and computes its only output."""
        (old,) = self.node.outputs
        assert old.shape is not None
        # The program assigns the number of the exchange: it can run the graph several times.
        numbered = {**attributes, "ranks": self.ranks, "exchange": 0}
        (new,) = place(self.node, kind, {**inputs, **self.exchange}, [old.shape], **numbered)
        take_place(old, new, self.graph)


def _exchange_inputs(graph: ir.Graph, ranks: int) -> dict[str, ir.Value | None]:
    """Add the inputs that ops need for an exchange, and return them."""
    shapes = {"inbox": (2, ranks - 1, "words", 2), "state": (2,), "fault": (8,)}
    inputs: dict[str, ir.Value | None] = {}
    for name, shape in shapes.items():
        kind = ir.TensorType(ir.DataType.INT32)
        value = ir.Value(name=EXCHANGE[name], shape=ir.Shape(shape), type=kind)
        graph.inputs.append(value)
        inputs[name] = value
    return inputs


def _qkv(at: _Node) -> int:
    q_heads, kv_heads = at.attributes["q_heads"], at.attributes["kv_heads"]
    split = partial(by_heads, q_heads=q_heads, kv_heads=kv_heads, ranks=at.ranks)
    rank_heads, (q, *pools) = q_heads // at.ranks, at.node.outputs
    at.replace_with(
        {"weight": at.shards("weight", split), "bias": at.shards("bias", split)},
        (ROWS, rank_heads, static(q, 2)),
        *[pool.shape for pool in pools if pool.shape is not None],
        q_heads=rank_heads,
        kv_heads=heads_of_rank(kv_heads, at.ranks),
    )
    return 1


def _attention(at: _Node) -> int:
    sinks = at.shards("sinks", partial(by_rows, ranks=at.ranks))
    width = static(at.node.outputs[0], 2)
    at.replace_with({"sinks": sinks}, (ROWS, static(at.inputs["q"], 1), width))
    return 1


def _swiglu(at: _Node) -> int:
    split = partial(by_rows, ranks=at.ranks)
    inner = static(at.node.outputs[0], 1) // at.ranks
    weights = {name: at.shards(name, split) for name in ("gate_up", "bias")}
    at.replace_with(weights, (ROWS, inner))
    return 1


def _linear(at: _Node) -> int:
    """Split a projection of a rank's values, or one that computes queries for absorption."""
    x, (y,) = at.inputs["x"], at.node.outputs
    before = None if x is None else x.producer()
    if before is not None and before.op_type in _SHARDED_ROWS:
        _require_units(at)
        weight = at.shards("weight", partial(by_columns, ranks=at.ranks))
        assert y.shape is not None
        (sums,) = place(at.node, "LinearPartial", {"x": x, "weight": weight}, [y.shape])
        at.replace_with_exchange(
            "RankSum", {"partial": sums, **_pick(at.inputs, "bias", "residual")}
        )
        return 1
    if all(user.op_type == "AbsorbQuery" for user in y.consumers()):
        split = partial(by_rows, ranks=at.ranks)
        shards = {name: at.shards(name, split) for name in ("weight", "bias")}
        at.replace_with(shards, (ROWS, static(y, 1) // at.ranks))
        return 1
    raise AssertionError(f"{y.name}: no rule splits this projection")


def _require_units(at: _Node) -> None:
    """Raise SpecbuildError if ranks cannot split a weight's units of columns evenly."""
    weight = at.inputs["weight"]
    units = static(weight, 1)
    if units % at.ranks:
        raise SpecbuildError(
            f"--tensor-parallel {at.ranks}: {stem(weight)} has {units} quantized units along K, "
            f"which is not a multiple of {at.ranks}; build with --weights-dtype bf16"
        )


def _low_rank(at: _Node) -> int:
    """Replicate latents; queries without a further projection are split by heads."""
    q, pool = at.node.outputs
    if not all(user.op_type == "AbsorbQuery" for user in q.consumers()):
        return 0
    width = static(q, 1)
    split = partial(first_rows_by_rank, rows=width // TILE_ROWS, ranks=at.ranks)
    assert at.inputs["q_norm"] is None and pool.shape is not None
    at.replace_with({"weight": at.shards("weight", split)}, (ROWS, width // at.ranks), pool.shape)
    return 1


def _absorb(at: _Node) -> int:
    heads = at.attributes["q_heads"] // at.ranks
    weight = at.shards("weight", partial(by_rows, ranks=at.ranks))
    width = static(at.node.outputs[0], 2)
    at.replace_with({"weight": weight}, (ROWS, heads, width), q_heads=heads)
    return 1


def _mla_attention(at: _Node) -> int:
    assert at.inputs["w_k"] is None and at.inputs["b_v"] is None
    values = at.shards("w_v", partial(by_middle_axis, ranks=at.ranks))
    sinks = at.shards("sinks", partial(by_rows, ranks=at.ranks))
    sizes = (ROWS, static(at.inputs["q"], 1), static(at.node.outputs[0], 2))
    at.replace_with({"w_v": values, "sinks": sinks}, sizes)
    return 1


def _moe(at: _Node) -> int:
    inner = static(at.inputs["gate_up_bias"], 1) // 2
    shards = {
        "gate_up": at.shards("gate_up", partial(expert_gate_up, ranks=at.ranks)),
        "gate_up_bias": at.shards("gate_up_bias", partial(expert_gate_up_bias, ranks=at.ranks)),
        "down": at.shards("down", partial(expert_down, inner=inner, ranks=at.ranks)),
        "down_bias": at.shards("down_bias", partial(only_first, ranks=at.ranks)),
    }
    at.replace_with_exchange("RankMoe", {**at.inputs, **shards}, **at.attributes)
    return 1


def _pick(values: dict[str, ir.Value | None], *names: str) -> dict[str, ir.Value | None]:
    return {name: values[name] for name in names}


_RULES: dict[str, Callable[[_Node], int]] = {
    "RmsQkvRope": _qkv,
    "PagedTreeAttention": _attention,
    "RmsSwiglu": _swiglu,
    "Linear": _linear,
    "RmsLowRank": _low_rank,
    "AbsorbQuery": _absorb,
    "MlaAttention": _mla_attention,
    "RmsMoe": _moe,
}
