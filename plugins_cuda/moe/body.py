"""Moe in standard ops: every expert on every row, weighted by a routing that is mostly zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder, static_size
from specbuild.plugins_cuda.moe.e2m1 import E2M1_CODES

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def routing(b: BodyBuilder, logits: ir.Value, *, experts: int, top_k: int, gating: str) -> ir.Value:
    """Weights of all experts, fp32 [T, E], zero for those that a row did not choose."""
    if gating == "softmax_selected" and top_k == experts:
        return b.Softmax(logits, axis=-1)
    picked, chosen = b.topk(logits, b.i64(top_k))
    if gating == "softmax_selected":
        weights = b.Softmax(picked, axis=-1)
    elif gating == "softmax_topk":
        weights = b.GatherElements(b.Softmax(logits, axis=-1), chosen, axis=1)
    elif gating == "sigmoid_norm":
        gate = b.Sigmoid(picked)
        weights = b.Div(gate, b.ReduceSum(gate, b.i64(1), keepdims=1))
    else:
        raise ValueError(f"Moe: unknown gating {gating!r}")
    # One node where a shape and a fill would be two; router logits are finite.
    zeros = b.Sub(logits, logits)
    return b.ScatterElements(zeros, chosen, weights, axis=1)


def expert_weight(b: BodyBuilder, weight: ir.Value, scales: ir.Value | None) -> ir.Value:
    """An expert weight as fp32 [E, in, out], dequantised where it is MXFP4."""
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


def clamped_swiglu(b: BodyBuilder, y: ir.Value, alpha: float, limit: float) -> ir.Value:
    """GPT-OSS's activation of [..., 2·I] with gate and up interleaved → [..., I]."""
    axis = b.i64(2)
    stop, step = b.i64(2**31), b.i64(2)
    gate = b.Min(b.Slice(y, b.i64(0), stop, axis, step), b.scalar(limit))
    up = b.Clip(b.Slice(y, b.i64(1), stop, axis, step), b.scalar(-limit), b.scalar(limit))
    sigmoid = b.Sigmoid(b.Mul(gate, b.scalar(alpha)))
    return b.Mul(b.Mul(gate, sigmoid), b.Add(up, b.scalar(1.0)))


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """The portable form, on the declared inputs; see ``dense.py`` and ``contrib.py`` for speed."""
    x, logits, gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias = inputs
    assert x is not None and logits is not None and gate_up is not None and down is not None
    if attributes["activation"] != "swiglu_clamped":
        raise ValueError(f"Moe: unknown activation {attributes['activation']!r}")
    top_k, gating = int(attributes["top_k"]), str(attributes["gating"])
    experts = static_size(logits, 1)
    weights = routing(b, logits, experts=experts, top_k=top_k, gating=gating)
    y = b.MatMul(x, expert_weight(b, gate_up, gate_up_scales))
    if gate_up_bias is not None:
        y = b.Add(y, b.Unsqueeze(gate_up_bias, b.i64(1)))
    h = clamped_swiglu(b, y, float(attributes["alpha"]), float(attributes["limit"]))
    z = b.MatMul(h, expert_weight(b, down, down_scales))
    if down_bias is not None:
        z = b.Add(z, b.Unsqueeze(down_bias, b.i64(1)))
    per_expert = b.Unsqueeze(b.Transpose(weights, perm=[1, 0]), b.i64(2))
    return [b.ReduceSum(b.Mul(z, per_expert), b.i64(0), keepdims=0)]
