"""The op Choose without a sort, unsigned integers or bitwise ops, which the library lacks.

Philox4x32-10 uses 64-bit products of 16-bit halves and tables for exclusive or. Top-k and top-p
keep a prefix of the tokens in descending order. Bisection finds the end of that prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder
from specbuild.plugins_cuda.choose.body import (
    PHILOX_KEY_STEPS,
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    any_of,
    argmax,
    below_floor,
)

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
WORD = 2**32
HALF = 2**16
# A token this far below the best cannot be sampled, because the noise is between -3 and 17.
MAX_LOGIT_GAP = 200.0
# Halvings of that range. The result, 2e-10, is below fp32's resolution except for logits near 0.
BISECTIONS = 40


def choose(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], _attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """The op Choose. The loops run no iteration if no row needs noise, top-k or top-p.

    TensorRT-RTX rejects loops inside branches, and compiles unrolled loops slowly.
    """
    logits, temperature, top_k, top_p, seed, position, floor = (*inputs, None)[:7]
    assert logits is not None and temperature is not None and top_k is not None
    assert top_p is not None and seed is not None and position is not None
    greedy = b.Equal(temperature, b.scalar(0.0))
    column = b.reshape(b.Where(greedy, b.scalar(1.0), temperature), -1, 1)
    scaled = b.Div(logits, column)
    if floor is not None:
        minimum = b.Sub(b.ReduceMax(scaled, b.i64(1), keepdims=1), b.scalar(MAX_LOGIT_GAP))
        scaled = b.Where(below_floor(b, logits, floor), minimum, scaled)
    sampled = b.Not(greedy)
    noise = gumbel_noise(b, seed, position, logits, times_if(b, sampled, PHILOX_ROUNDS))
    token_filter = TokenFilter(b, sampled, scaled)
    in_top_k = token_filter.top_k(top_k)
    kept = b.And(in_top_k, token_filter.top_p(top_p, in_top_k))
    noisy = b.Where(kept, b.Add(scaled, noise), b.scalar(-np.inf))
    choice = argmax(b, b.Where(b.reshape(greedy, -1, 1), logits, noisy))
    logprob = b.GatherElements(b.LogSoftmax(logits, axis=1), choice, axis=1)
    flat = b.i64(-1)
    return [b.cast(b.Reshape(choice, flat), ir.DataType.INT32), b.Reshape(logprob, flat)]


def times_if(b: BodyBuilder, flags: ir.Value, times: int) -> ir.Value:
    """Return ``times`` if any of the bools [R] is set, else 0: an int64 scalar."""
    return b.Where(any_of(b, flags), b.scalar(times, np.int64), b.scalar(0, np.int64))


def exclusive_or(b: BodyBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Compute x ^ y of non-negative 32-bit numbers in int64, byte by byte from a table."""
    weights = b.constant([1, 2**8, 2**16, 2**24], np.int64)
    byte = b.scalar(2**8, np.int64)
    last = b.i64(-1)

    def bytes_of(value: ir.Value) -> ir.Value:
        return b.Mod(b.Div(b.Unsqueeze(value, last), weights), byte)

    numbers = np.arange(2**8)
    table = b.constant((numbers[:, None] ^ numbers).reshape(-1), np.int64)
    bytes_out = b.Gather(table, b.Add(b.Mul(bytes_of(x), byte), bytes_of(y)), axis=0)
    return b.ReduceSum(b.Mul(bytes_out, weights), last, keepdims=0)


def high_and_low(b: BodyBuilder, x: ir.Value, multiplier: int) -> tuple[ir.Value, ir.Value]:
    """Return both words of the 64-bit product of 32-bit numbers; no intermediate exceeds 2^49."""
    half, word = b.scalar(HALF, np.int64), b.scalar(WORD, np.int64)
    factor = b.scalar(multiplier, np.int64)
    of_high, of_low = b.Mul(b.Div(x, half), factor), b.Mul(b.Mod(x, half), factor)
    high = b.Div(b.Add(of_high, b.Div(of_low, half)), half)
    low = b.Mod(b.Add(b.Mul(b.Mod(of_high, half), half), of_low), word)
    return high, low


def philox(
    b: BodyBuilder, counter: Sequence[ir.Value], key: Sequence[ir.Value], rounds: ir.Value
) -> list[ir.Value]:
    """Philox4x32 (Salmon et al. 2011) on four 32-bit words in int64.

    The words of the counter have the same shape, and those of the key broadcast to it.
    """

    def one_round(inner: BodyBuilder, state: Sequence[ir.Value]) -> list[ir.Value]:
        c, k = state[:4], state[4:]
        (high0, low0), (high1, low1) = (
            high_and_low(inner, x, m) for x, m in zip((c[0], c[2]), PHILOX_MULTIPLIERS, strict=True)
        )
        word = inner.scalar(WORD, np.int64)
        return [
            exclusive_or(inner, high1, exclusive_or(inner, c[1], k[0])),
            low1,
            exclusive_or(inner, high0, exclusive_or(inner, c[3], k[1])),
            low0,
            *(
                inner.Mod(inner.Add(x, inner.scalar(step, np.int64)), word)
                for x, step in zip(k, PHILOX_KEY_STEPS, strict=True)
            ),
        ]

    return list(b.repeat(rounds, [*counter, *key], INT64, one_round)[:4])


def gumbel_noise(
    b: BodyBuilder, seed: ir.Value, position: ir.Value, logits: ir.Value, rounds: ir.Value
) -> ir.Value:
    """Return noise [R, V]: word v % 4 for counter (position, v // 4, 0, 0) and key (seed, 0)."""
    one, word = b.scalar(1, np.int64), b.scalar(WORD, np.int64)
    vocab = b.size(logits, 1)
    blocks = b.Div(b.Add(vocab, b.i64(3)), b.i64(4))
    block = b.Range(b.scalar(0, np.int64), b.Squeeze(blocks, b.i64(0)), one)
    zero = b.constant([[0]], np.int64)

    def column(x: ir.Value) -> ir.Value:
        # A negative number represents the word with the same bits.
        shifted = b.Add(b.cast(b.reshape(x, -1, 1), INT64), word)
        return b.Mod(shifted, word)

    rows, key = column(position), column(seed)
    grid = b.Concat(b.size(rows, 0), b.size(block, 0), axis=0)
    counter = [b.Expand(x, grid) for x in (rows, b.Unsqueeze(block, b.i64(0)), zero, zero)]
    words = philox(b, counter, [key, b.Sub(key, key)], rounds)
    last = b.i64(2)
    bits = b.Concat(*(b.Unsqueeze(w, last) for w in words), axis=2)
    flat = b.Slice(b.reshape(bits, 0, -1), b.i64(0), vocab, b.i64(1))
    mantissa = b.cast(b.Div(flat, b.scalar(2**9, np.int64)), FLOAT)
    u = b.Mul(b.Add(mantissa, b.scalar(0.5)), b.scalar(2.0**-23))
    return b.Neg(b.Log(b.Neg(b.Log(u))))


class TokenFilter:
    """Top-k and top-p over ``scaled`` [R, V], for the rows with ``sampled`` [R] set.

    In descending order, with ties by ascending id, top-k keeps the first k tokens. Top-p keeps a
    token if those before it have less than p of the probability that top-k left. It always keeps
    the first.
    """

    def __init__(self, b: BodyBuilder, sampled: ir.Value, scaled: ir.Value) -> None:
        self._b = b
        self._sampled = sampled
        self._best = b.ReduceMax(scaled, b.i64(1), keepdims=1)
        self._value = b.Max(scaled, b.Sub(self._best, b.scalar(MAX_LOGIT_GAP)))

    def top_k(self, top_k: ir.Value) -> ir.Value:
        """Return bool [R, V] for ``top_k`` int32 [R]; 0 disables it."""
        b = self._b
        is_enabled = b.Greater(top_k, b.scalar(0, np.int32))
        ones = b.Expand(b.scalar(1.0), b.Shape(self._value))
        in_prefix = self._prefix(ones, b.reshape(b.cast(top_k, FLOAT), -1, 1), is_enabled)
        return b.Or(b.Not(b.reshape(is_enabled, -1, 1)), in_prefix)

    def top_p(self, top_p: ir.Value, in_top_k: ir.Value) -> ir.Value:
        """Return bool [R, V] for ``top_p`` fp32 [R]; 1 disables it."""
        b = self._b
        is_enabled = b.Less(top_p, b.scalar(1.0))
        odds = b.Exp(b.Sub(self._value, self._best))
        mass = b.Where(in_top_k, odds, b.scalar(0.0))
        mass = b.Div(mass, b.ReduceSum(mass, b.i64(1), keepdims=1))
        # A limit of 0 keeps the first token, because the sum before it is 0.
        in_prefix = self._prefix(mass, b.reshape(b.Max(top_p, b.scalar(1e-30)), -1, 1), is_enabled)
        return b.Or(b.Not(b.reshape(is_enabled, -1, 1)), in_prefix)

    def _prefix(self, weight: ir.Value, limit: ir.Value, is_enabled: ir.Value) -> ir.Value:
        """Return the tokens for which the weights before them sum to less than ``limit`` [R, 1].

        ``weight`` is [R, V], and the order is descending. Rows that are not enabled are undefined.
        """
        b, value, axis = self._b, self._value, self._b.i64(1)

        def above(b: BodyBuilder, threshold: ir.Value) -> ir.Value:
            counted = b.Where(b.Greater(value, threshold), weight, b.scalar(0.0))
            return b.ReduceSum(counted, b.i64(1), keepdims=1)

        def halve(inner: BodyBuilder, bounds: Sequence[ir.Value]) -> list[ir.Value]:
            low, high = bounds
            middle = inner.Mul(inner.Add(low, high), inner.scalar(0.5))
            fits = inner.Less(above(inner, middle), limit)
            return [inner.Where(fits, low, middle), inner.Where(fits, middle, high)]

        # The weights above ``high`` sum to less than the limit. Those above ``low`` do not, unless
        # ``low`` is below all values.
        bounds = [b.Sub(b.ReduceMin(value, axis, keepdims=1), b.scalar(1.0)), self._best]
        times = times_if(b, b.And(is_enabled, self._sampled), BISECTIONS)
        low, _ = b.repeat(times, bounds, FLOAT, halve)
        reached = b.Where(b.Greater(value, low), value, b.scalar(np.inf))
        last = b.ReduceMin(reached, axis, keepdims=1)
        tied = b.Equal(value, last)
        tied_weight = b.Where(tied, weight, b.scalar(0.0))
        before = b.CumSum(tied_weight, b.scalar(1, np.int64), exclusive=1)
        within = b.Less(b.Add(above(b, last), before), limit)
        return b.Or(b.Greater(value, last), b.And(tied, within))
