"""TreeSelect in standard ops: a stable top-N, parents by counting, ancestors by squaring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder

FLOAT, INT32, INT64 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64

# With up to this many levels, the counts of walks in a closure are exact enough in fp32.
UNCLIPPED_LEVELS = 64


def ancestor_matrix(b: BodyBuilder, parent: ir.Value, slots: ir.Value, depth: int) -> ir.Value:
    """Return reflexive ancestors as bools [B, n, n], from parent slots [B, n] (-1: none).

    (I + P)^L is positive exactly at the ends of walks of at most L parent steps. L doubles with
    every squaring until it reaches ``depth``.
    """
    column = b.Unsqueeze(slots, b.i64(1))
    step = b.Or(b.Equal(b.Unsqueeze(parent, b.i64(2)), slots), b.Equal(column, slots))
    if depth <= 1:
        return step
    walks, levels = b.cast(step, FLOAT), 1
    while levels < depth:
        walks, levels = b.MatMul(walks, walks), 2 * levels
        if levels >= UNCLIPPED_LEVELS:
            walks = b.Min(walks, b.scalar(1.0))
    return b.cast(walks, ir.DataType.BOOL)


def packed(b: BodyBuilder, bits: ir.Value, nodes: ir.Value) -> ir.Value:
    """Pack int32 0/1 [B, n, n] to int32 words [B, n, ceil(n / 32)]; ``nodes`` is n as int64 [1]."""
    missing = b.Mod(b.Neg(nodes), b.i64(32))
    pads = b.Concat(b.i64(0, 0, 0, 0, 0), missing, axis=0)
    padded = b.reshape(b.Pad(bits, pads), 0, 0, -1, 32)
    # Bit 31 is the sign of an int32 word.
    values = b.constant([2**bit for bit in range(31)] + [-(2**31)], np.int32)
    return b.ReduceSum(b.Mul(padded, values), b.i64(3), keepdims=0)


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """Return the standard-ONNX body's outputs."""
    tokens, scores, parents, draft_tokens = inputs
    assert tokens is not None and scores is not None
    assert parents is not None and draft_tokens is not None
    minus_one = b.scalar(-1, np.int32)
    one, zero = b.scalar(1, np.int64), b.scalar(0, np.int64)
    num_selected = b.reshape(b.cast(draft_tokens, INT64), 1)
    nodes = b.Add(num_selected, b.i64(1))
    slots = b.Range(zero, b.Squeeze(nodes, b.i64(0)), one)

    pool = b.size(scores, 1)
    best, ids = b.topk(scores, num_selected)
    # Absent candidates get the index past the pool, so that they are sorted last.
    ids = b.Where(b.Greater(best, b.scalar(-np.inf)), ids, pool)
    kept, _ = b.topk(ids, num_selected, largest=False)
    valid = b.Less(kept, pool)
    index = b.Min(kept, b.Sub(pool, b.i64(1)))
    root = b.i64(0, 1, 0, 0)

    kept_tokens = b.Where(valid, b.GatherElements(tokens, index, axis=1), minus_one)
    tree_tokens = b.Pad(kept_tokens, root, minus_one)
    # A candidate's slot is the number of selected ones up to it; the slot of the root (-1) is 0.
    parent = b.cast(b.GatherElements(parents, index, axis=1), INT64)
    up_to = b.LessOrEqual(b.Unsqueeze(kept, b.i64(1)), b.Unsqueeze(parent, b.i64(2)))
    parent_slot = b.ReduceSum(b.cast(up_to, INT32), b.i64(2), keepdims=0)
    tree_parents = b.Pad(b.Where(valid, parent_slot, minus_one), root, minus_one)

    depth = int(attributes["depth"])
    ancestors = b.cast(ancestor_matrix(b, b.cast(tree_parents, INT64), slots, depth), INT32)
    depths = b.Add(b.ReduceSum(ancestors, b.i64(2), keepdims=0), minus_one)
    used = b.ReduceSum(b.cast(valid, INT32), b.i64(1), keepdims=0)
    count = b.Add(used, b.scalar(1, np.int32))
    return [tree_tokens, tree_parents, depths, packed(b, ancestors, nodes), count]
