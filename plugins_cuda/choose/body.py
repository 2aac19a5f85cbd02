"""Choose in standard ops: noise if a row is sampled, a sort if a row has top-k or top-p."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

FLOAT, INT64, UINT64 = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.UINT64


def philox(b: BodyBuilder, counter: Sequence[ir.Value], key: Sequence[ir.Value]) -> list[ir.Value]:
    """Compute Philox4x32-10: four uint64 words of 32 bits in, four out; all broadcast."""
    c, k = list(counter), list(key)
    mask, half = b.scalar(0xFFFFFFFF, np.uint64), b.scalar(32, np.uint64)
    multipliers = [b.scalar(m, np.uint64) for m in PHILOX_MULTIPLIERS]
    steps = [b.scalar(s, np.uint64) for s in PHILOX_KEY_STEPS]
    for _ in range(PHILOX_ROUNDS):
        product = [b.Mul(w, m) for w, m in zip((c[0], c[2]), multipliers, strict=True)]
        high = [b.BitShift(p, half, direction="RIGHT") for p in product]
        low = [b.BitwiseAnd(p, mask) for p in product]
        c = [
            b.BitwiseXor(high[1], b.BitwiseXor(c[1], k[0])),
            low[1],
            b.BitwiseXor(high[0], b.BitwiseXor(c[3], k[1])),
            low[0],
        ]
        k = [b.BitwiseAnd(b.Add(w, s), mask) for w, s in zip(k, steps, strict=True)]
    return c


def noise_bits(b: BodyBuilder, seed: ir.Value, position: ir.Value, vocab: ir.Value) -> ir.Value:
    """Return random words uint64 [R, V] for ``vocab`` [1] tokens.

    Token v has word v % 4 of counter (position, v // 4, 0, 0) and key (seed, 0).
    """
    one = b.scalar(1, np.int64)
    blocks = b.Div(b.Add(vocab, b.i64(3)), b.i64(4))
    block = b.Range(b.scalar(0, np.int64), b.Squeeze(blocks, b.i64(0)), one)
    zero = b.constant([[0]], np.uint64)

    def column(x: ir.Value) -> ir.Value:
        return b.cast(b.reshape(x, -1, 1), UINT64)

    counter = [column(position), b.Unsqueeze(b.cast(block, UINT64), b.i64(0)), zero, zero]
    words = philox(b, counter, [column(seed), zero])
    last = b.i64(2)
    bits = b.Concat(*(b.Unsqueeze(word, last) for word in words), axis=2)
    return b.Slice(b.reshape(bits, 0, -1), b.i64(0), vocab, b.i64(1))


def gumbel(b: BodyBuilder, bits: ir.Value) -> ir.Value:
    """Return the noise of random words: −log(−log u) with u = ((x >> 9) + ½)·2⁻²³."""
    mantissa = b.cast(b.BitShift(bits, b.scalar(9, np.uint64), direction="RIGHT"), FLOAT)
    u = b.Mul(b.Add(mantissa, b.scalar(0.5)), b.scalar(2.0**-23))
    return b.Neg(b.Log(b.Neg(b.Log(u))))


def without_tail(
    b: BodyBuilder,
    noisy: ir.Value,
    scaled: ir.Value,
    sampled: ir.Value,
    top_k: ir.Value,
    top_p: ir.Value,
) -> ir.Value:
    """Return ``noisy`` [R, V] with −inf at the tokens that top-k, then top-p, remove.

    The sort is as wide as the largest top-k of a ``sampled`` row; a greedy row may lose its tail.
    """
    vocab = b.size(scaled, 1)
    zero, one = b.scalar(0, np.int64), b.scalar(1, np.int64)
    requested = b.cast(top_k, INT64)
    width = b.Min(b.Where(b.Greater(requested, zero), requested, vocab), vocab)
    widest = b.ReduceMax(b.Where(sampled, width, one), b.i64(0), keepdims=1)
    ordered, order = b.topk(scaled, widest)
    rank = b.Range(zero, b.Squeeze(widest, b.i64(0)), one)
    in_top_k = b.Less(rank, b.reshape(width, -1, 1))
    low = b.scalar(-np.inf)
    p = b.Softmax(b.Where(in_top_k, ordered, low), axis=1)
    before = b.CumSum(p, one, exclusive=1)
    limit = b.reshape(top_p, -1, 1)
    no_top_p = b.GreaterOrEqual(limit, b.scalar(1.0))
    in_top_p = b.Or(b.Or(b.Less(before, limit), no_top_p), b.Equal(rank, zero))
    kept = b.Where(b.And(in_top_k, in_top_p), b.GatherElements(noisy, order, axis=1), low)
    return b.ScatterElements(b.Expand(low, b.Shape(noisy)), order, kept, axis=1)


def below_floor(b: BodyBuilder, logits: ir.Value, floor: ir.Value) -> ir.Value:
    """Return where ``logits`` [R, V] are below the largest + ``floor`` [R], if floor is below 0."""
    depth = b.Where(b.Less(floor, b.scalar(0.0)), floor, b.scalar(-np.inf))
    threshold = b.Add(b.ReduceMax(logits, b.i64(1), keepdims=1), b.reshape(depth, -1, 1))
    return b.Less(logits, threshold)


def argmax(b: BodyBuilder, score: ir.Value) -> ir.Value:
    """Return the lowest index of the largest value: int64 [R, 1]."""
    return b.ArgMax(score, axis=1, keepdims=1, select_last_index=0)


def any_of(b: BodyBuilder, flags: ir.Value) -> ir.Value:
    """Return whether any of the bools [R] is set, as a bool scalar."""
    maximum = b.ReduceMax(b.cast(flags, ir.DataType.INT32), b.i64(0), keepdims=0)
    return b.cast(maximum, ir.DataType.BOOL)


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], _attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """Return the body's outputs. A launch of greedy rows computes an argmax and a log-softmax."""
    logits, temperature, top_k, top_p, seed, position, floor = (*inputs, None)[:7]
    assert logits is not None and temperature is not None and top_k is not None
    assert top_p is not None and seed is not None and position is not None
    greedy = b.Equal(temperature, b.scalar(0.0))
    sampled = b.Not(greedy)

    def sample(inner: BodyBuilder) -> ir.Value:
        column = inner.reshape(inner.Where(greedy, inner.scalar(1.0), temperature), -1, 1)
        scaled = inner.Div(logits, column)
        if floor is not None:
            low = inner.scalar(-np.inf)
            scaled = inner.Where(below_floor(inner, logits, floor), low, scaled)
        bits = noise_bits(inner, seed, position, inner.size(logits, 1))
        noisy = inner.Add(scaled, gumbel(inner, bits))
        cuts = inner.Or(
            inner.Greater(top_k, inner.scalar(0, np.int32)), inner.Less(top_p, inner.scalar(1.0))
        )
        noisy = inner.branch(
            any_of(inner, inner.And(cuts, sampled)),
            lambda deeper: without_tail(deeper, noisy, scaled, sampled, top_k, top_p),
            lambda deeper: deeper.Identity(noisy),
        )
        plain = inner.reshape(greedy, -1, 1)
        return argmax(inner, inner.Where(plain, logits, noisy))

    choice = b.branch(any_of(b, sampled), sample, lambda inner: argmax(inner, logits))
    logprob = b.GatherElements(b.LogSoftmax(logits, axis=1), choice, axis=1)
    flat = b.i64(-1)
    return [b.cast(b.Reshape(choice, flat), ir.DataType.INT32), b.Reshape(logprob, flat)]
