"""TreeAccept in standard ops: a node is accepted iff it and all its ancestors match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder

FLOAT, INT32, INT64 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """Return the standard-ONNX body's outputs."""
    # Only device steps are ragged, so there is no ``row_start``.
    tokens, parents, ancestor_bits, count, choice = inputs[:5]
    assert tokens is not None and parents is not None and ancestor_bits is not None
    assert count is not None and choice is not None
    one, zero = b.scalar(1, np.int64), b.scalar(0, np.int64)
    nodes = b.size(tokens, 1)
    slots = b.Range(zero, b.Squeeze(nodes, b.i64(0)), one)

    words = b.Mod(b.cast(ancestor_bits, INT64), b.scalar(2**32, np.int64))
    powers = b.constant([2**bit for bit in range(32)], np.int64)
    bits = b.Mod(b.Div(b.Unsqueeze(words, b.i64(3)), powers), b.scalar(2, np.int64))
    bits = b.cast(b.reshape(bits, 0, 0, -1), FLOAT)
    of_nodes = b.Slice(bits, b.i64(0), nodes, b.i64(2))

    parent = b.cast(parents, INT64)
    required = b.GatherElements(choice, b.Max(parent, zero), axis=1)
    unused = b.GreaterOrEqual(slots, b.reshape(b.cast(count, INT64), -1, 1))
    differs = b.And(b.Not(b.Equal(tokens, required)), b.Greater(slots, zero))
    mismatch = b.cast(b.Or(differs, unused), FLOAT)
    failures = b.MatMul(of_nodes, b.Unsqueeze(mismatch, b.i64(2)))
    # The depth of nodes whose ancestors all match, −1 for others: the root remains the minimum.
    depths = b.Sub(b.ReduceSum(of_nodes, b.i64(2), keepdims=1), b.scalar(1.0))
    length = b.Where(b.Greater(failures, b.scalar(0.0)), b.scalar(-1.0), depths)
    end = b.ArgMax(length, axis=1, keepdims=1, select_last_index=0)
    accepted = b.cast(b.reshape(b.GatherElements(length, end, axis=1), -1), INT32)
    end = b.reshape(end, -1, 1)
    next_token = b.reshape(b.GatherElements(choice, end, axis=1), -1)
    return [path_to(b, bits, end, int(attributes["depth"])), accepted, next_token]


def path_to(b: BodyBuilder, bits: ir.Value, end: ir.Value, depth: int) -> ir.Value:
    """Return the slots of the ancestors of node ``end`` [B, 1], ascending: int32 [B, depth + 1].

    ``bits`` fp32 [B, n, 32·W]: the reflexive ancestors of every node.
    """
    columns = b.size(bits, 2)
    row = b.GatherND(bits, end, batch_dims=1)
    slot = b.Range(b.scalar(0, np.int64), b.Squeeze(columns, b.i64(0)), b.scalar(1, np.int64))
    none = b.scalar(2**31, np.int64)
    slots = b.Where(b.Greater(row, b.scalar(0.0)), slot, none)
    if depth + 1 > 32:
        slots = b.Pad(slots, b.i64(0, 0, 0, depth + 1 - 32), none)
    path, _ = b.topk(slots, b.i64(depth + 1), largest=False)
    absent = b.Equal(path, none)
    return b.cast(b.Where(absent, b.scalar(-1, np.int64), path), INT32)
