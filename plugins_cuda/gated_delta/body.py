"""GatedDelta as ONNX Runtime's contrib ops over paths [S, L], with one arithmetic for all row
counts.

Each op computes a row by the same operations, regardless of other rows; the tests check this bit
for bit. A chunked form would add in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import CONTRIB_DOMAIN, INT64, BodyBuilder, static_size

_NORM_EPS = 1e-6


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """Return the outputs of the ONNX Runtime body. Absent rows of a path (−1) keep its state."""
    rows, conv_weight, decay_scale, dt_bias, path_rows, *rest = inputs
    read_slot, write_slot, tail_pool, state_pool = rest
    assert rows is not None and conv_weight is not None and path_rows is not None
    assert decay_scale is not None and dt_bias is not None
    assert read_slot is not None and write_slot is not None
    assert tail_pool is not None and state_pool is not None
    heads, key_width, value_width = (static_size(state_pool, axis) for axis in (1, 2, 3))
    channels, tail_rows = static_size(tail_pool, 2), static_size(tail_pool, 1)
    key_heads = attributes["key_heads"]
    path = _Path(b, path_rows)
    mixed, beta, decay = b.Split(
        b.Gather(rows, path.row, axis=0), b.i64(channels, heads, heads), outputs=3, axis=-1
    )
    read = b.cast(read_slot, INT64)
    tail = b.Gather(tail_pool, read, axis=0)
    convolved, _ = b.CausalConvWithState(
        mixed,
        conv_weight,
        None,
        tail,
        outputs=2,
        domain=CONTRIB_DOMAIN,
        activation="silu",
        channels_last=1,
    )
    keys = key_heads * key_width
    qk, v = b.Split(convolved, b.i64(2 * keys, heads * value_width), outputs=2, axis=-1)
    q, k = b.Split(
        _unit_heads(b, qk, 2 * key_heads, key_width), b.i64(keys, keys), outputs=2, axis=-1
    )
    decay, beta = b.LinearAttentionGate(
        decay, dt_bias, decay_scale, beta, outputs=2, domain=CONTRIB_DOMAIN
    )
    mixed_rows, state = b.LinearAttention(
        q,
        k,
        v,
        b.Gather(state_pool, read, axis=0),
        b.Mul(decay, path.mask),
        b.Mul(beta, path.mask),
        outputs=2,
        domain=CONTRIB_DOMAIN,
        q_num_heads=key_heads,
        kv_num_heads=heads,
        update_rule="gated_delta",
    )
    write = b.Unsqueeze(b.cast(write_slot, INT64), b.i64(-1))
    output = b.Gather(
        b.reshape(mixed_rows, -1, heads, value_width), path.place_of_row(rows), axis=0
    )
    return [
        output,
        b.ScatterND(tail_pool, write, path.tail(tail, mixed, tail_rows)),
        b.ScatterND(state_pool, write, state),
    ]


class _Path:
    """The data that layers share: the rows of each path, and the place of each row's result."""

    def __init__(self, b: BodyBuilder, path_rows: ir.Value) -> None:
        self._b = b
        self._rows = b.cast(path_rows, INT64)
        self._zero = b.scalar(0, dtype=np.int64)
        self._used = b.GreaterOrEqual(self._rows, self._zero)
        self.row = b.Max(self._rows, self._zero)
        self.mask = b.Unsqueeze(b.cast(self._used, ir.DataType.FLOAT), b.i64(-1))

    def place_of_row(self, rows: ir.Value) -> ir.Value:
        """Return the place in the paths, [S·L], of each of the rows [T]."""
        b, count = self._b, self._b.size(rows, 0)
        flat = b.Reshape(b.Where(self._used, self._rows, count), b.i64(-1))
        places = b.Range(self._zero, b.Squeeze(b.size(flat, 0)), b.scalar(1, dtype=np.int64))
        # Rows on several paths have equal results; places without a row are written past the end.
        none = b.Expand(self._zero, b.Add(count, b.i64(1)))
        spread = b.ScatterElements(none, flat, places, axis=0)
        return b.Slice(spread, b.i64(0), count, b.i64(0))

    def tail(self, before: ir.Value, mixed: ir.Value, count: int) -> ir.Value:
        """Return the last ``count`` inputs of each path: of [S, L, C], after [S, count, C]."""
        b = self._b
        used = b.ReduceSum(b.cast(self._used, INT64), b.i64(1), keepdims=1)
        place = b.Add(used, b.i64(*range(-count, 0)))
        recent = b.GatherND(mixed, b.Unsqueeze(b.Max(place, self._zero), b.i64(-1)), batch_dims=1)
        last = b.scalar(count - 1, dtype=np.int64)
        older = b.Min(b.Add(place, b.scalar(count, dtype=np.int64)), last)
        kept = b.GatherND(before, b.Unsqueeze(older, b.i64(-1)), batch_dims=1)
        is_recent = b.Unsqueeze(b.GreaterOrEqual(place, self._zero), b.i64(-1))
        return b.Where(is_recent, recent, kept)


def _unit_heads(b: BodyBuilder, x: ir.Value, heads: int, width: int) -> ir.Value:
    """Return each head of ``x`` [S, L, heads·width] normalized: x·(Σx² + ε)^−½."""
    scale = b.constant(np.full(width, width**-0.5), np.float32)
    normed = b.SimplifiedLayerNormalization(
        b.reshape(x, 0, 0, heads, width), scale, axis=-1, epsilon=_NORM_EPS / width
    )
    return b.reshape(normed, 0, 0, heads * width)
