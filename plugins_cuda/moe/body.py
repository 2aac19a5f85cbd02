"""Moe in standard ops: every expert computes every row, weighted by a routing that is mostly 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder, static_size
from specbuild.plugins_cuda.moe.e2m1 import E2M1_CODES

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64

ACTIVATIONS = ("swiglu_clamped", "swiglu", "geglu_tanh")
# The number of a group's best scores that are added to the score of the group.
GROUP_SCORES = {"sum_of_two": 2, "max": 1}
# A sum of vanishing sigmoids must not be a zero divisor.
MIN_SUM = 1e-20
UNCHOSEN = -1e30


def _in_best_groups(b: BodyBuilder, scores: ir.Value, attributes: Mapping[str, Any]) -> ir.Value:
    """Return ``scores`` [T, E], lowered outside of the best groups."""
    group_score = str(attributes["group_score"])
    if group_score not in GROUP_SCORES:
        raise ValueError(f"Moe: unknown group_score {group_score!r}")
    by_group = b.reshape(scores, 0, int(attributes["groups"]), -1)
    best, _ = b.topk(by_group, b.i64(GROUP_SCORES[group_score]))
    of_group = b.ReduceSum(best, b.i64(2), keepdims=0)
    picked, kept = b.topk(of_group, b.i64(int(attributes["groups_chosen"])))
    low = b.Add(b.Sub(of_group, of_group), b.scalar(UNCHOSEN))
    mask = b.ScatterElements(low, kept, b.Sub(picked, picked), axis=1)
    return b.Reshape(b.Add(by_group, b.Unsqueeze(mask, b.i64(2))), b.Shape(scores))


def routing(
    b: BodyBuilder,
    logits: ir.Value,
    choice_bias: ir.Value | None,
    attributes: Mapping[str, Any],
    *,
    experts: int,
    scale: ir.Value | None = None,
) -> ir.Value:
    """Return the weights of all experts, fp32 [T, E], zero for experts that a row did not select.

    ``scale`` [E] is a factor of each expert's weights.
    """
    top_k, gating = int(attributes["top_k"]), str(attributes["gating"])
    scaling = float(attributes["scaling"])
    if gating == "softmax_selected" and top_k == experts and scaling == 1.0 and scale is None:
        return b.Softmax(logits, axis=-1)
    scores = logits if choice_bias is None else b.Add(b.Sigmoid(logits), choice_bias)
    if int(attributes["groups_chosen"]) < int(attributes["groups"]):
        scores = _in_best_groups(b, scores, attributes)
    picked, chosen = b.topk(scores, b.i64(top_k))
    if scores is not logits:
        picked = b.GatherElements(logits, chosen, axis=1)
    if gating == "softmax_selected":
        weights = b.Softmax(picked, axis=-1)
    elif gating == "softmax_topk":
        weights = b.GatherElements(b.Softmax(logits, axis=-1), chosen, axis=1)
    elif gating == "sigmoid_norm":
        gate = b.Sigmoid(picked)
        total = b.ReduceSum(gate, b.i64(1), keepdims=1)
        weights = b.Div(gate, b.Add(total, b.scalar(MIN_SUM)))
    elif gating == "sigmoid":
        weights = b.Sigmoid(picked)
    else:
        raise ValueError(f"Moe: unknown gating {gating!r}")
    if scaling != 1.0:
        weights = b.Mul(weights, b.scalar(scaling))
    if scale is not None:
        weights = b.Mul(weights, b.Gather(scale, chosen))
    # One node instead of a shape and a fill; router logits are finite.
    zeros = b.Sub(logits, logits)
    return b.ScatterElements(zeros, chosen, weights, axis=1)


def expert_weight(b: BodyBuilder, weight: ir.Value, scales: ir.Value | None) -> ir.Value:
    """Return an expert weight as fp32 [E, in, out], dequantized if it is MXFP4."""
    if scales is None:
        return weight
    byte = b.cast(weight, INT64)
    sixteen = b.scalar(16, np.int64)
    last = b.i64(4)
    nibbles = b.Concat(
        b.Unsqueeze(b.Mod(byte, sixteen), last), b.Unsqueeze(b.Div(byte, sixteen), last), axis=4
    )
    values = b.Gather(b.constant(E2M1_CODES, np.float32), nibbles)
    exponent = b.Sub(b.cast(scales, FLOAT), b.scalar(127.0))
    factor = b.Unsqueeze(b.Pow(b.scalar(2.0), exponent), b.i64(3))
    scaled = b.Mul(b.reshape(values, 0, 0, 0, 32), factor)
    return b.Transpose(b.reshape(scaled, 0, 0, -1), perm=[0, 2, 1])


def gated(b: BodyBuilder, gate: ir.Value, up: ir.Value, attributes: Mapping[str, Any]) -> ir.Value:
    """Return the activation of experts for gate and up [..., I] each: [..., I]."""
    kind = attributes["activation"]
    if kind not in ACTIVATIONS:
        raise ValueError(f"Moe: unknown activation {kind!r}")
    if kind == "swiglu":
        return b.Mul(b.Mul(gate, b.Sigmoid(gate)), up)
    if kind == "geglu_tanh":
        return b.Mul(b.Gelu(gate, approximate="tanh"), up)
    alpha, limit = float(attributes["alpha"]), float(attributes["limit"])
    gate = b.Min(gate, b.scalar(limit))
    up = b.Clip(up, b.scalar(-limit), b.scalar(limit))
    sigmoid = b.Sigmoid(b.Mul(gate, b.scalar(alpha)))
    return b.Mul(b.Mul(gate, sigmoid), b.Add(up, b.scalar(1.0)))


def _gate_and_up(b: BodyBuilder, y: ir.Value) -> tuple[ir.Value, ir.Value]:
    axis, stop, step = b.i64(2), b.i64(2**31), b.i64(2)
    gate = b.Slice(y, b.i64(0), stop, axis, step)
    return gate, b.Slice(y, b.i64(1), stop, axis, step)


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """Return the portable body's outputs; ``weighted_body.py`` has faster ones."""
    x, logits, gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias = inputs[:8]
    assert x is not None and logits is not None and gate_up is not None and down is not None
    experts, scale = static_size(logits, 1), inputs[9]
    weights = routing(b, logits, inputs[8], attributes, experts=experts, scale=scale)
    y = b.MatMul(x, expert_weight(b, gate_up, gate_up_scales))
    if gate_up_bias is not None:
        y = b.Add(y, b.Unsqueeze(gate_up_bias, b.i64(1)))
    h = gated(b, *_gate_and_up(b, y), attributes)
    z = b.MatMul(h, expert_weight(b, down, down_scales))
    if down_bias is not None:
        z = b.Add(z, b.Unsqueeze(down_bias, b.i64(1)))
    per_expert = b.Unsqueeze(b.Transpose(weights, perm=[1, 0]), b.i64(2))
    return [b.ReduceSum(b.Mul(z, per_expert), b.i64(0), keepdims=0)]
