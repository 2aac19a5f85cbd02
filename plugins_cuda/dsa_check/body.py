"""DsaCheck in standard ops: it counts the visible and the mandatory slots of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder
from specbuild.plugins_cuda.paged_tree_attention.body import (
    INT64,
    WHOLE,
    rows_of,
    unpacked_bits,
)

INT32 = ir.DataType.INT32


@dataclass(frozen=True)
class _Row:
    """Values of every row, int64 [T, 1, 1]; ``bits`` [T, 32·W] are 0 or 1.

    A row attends to the slots below ``chain`` and to ``nodes`` of its tree, which starts at
    ``start``. Those below ``first`` and from ``late`` on are mandatory: ``kept`` slots. Its list
    has ``num_listed`` slots.
    """

    start: ir.Value
    bits: ir.Value
    chain: ir.Value
    first: ir.Value
    late: ir.Value
    kept: ir.Value
    num_listed: ir.Value


def _of_row(b: BodyBuilder, x: ir.Value) -> ir.Value:
    return b.reshape(b.cast(x, INT64), -1, 1, 1)


def _row(
    b: BodyBuilder,
    row_slot: ir.Value,
    start: ir.Value,
    words: ir.Value,
    allowed: ir.Value,
    attributes: Mapping[str, Any],
) -> _Row:
    zero, one = b.scalar(0, np.int64), b.scalar(1, np.int64)
    own = _of_row(b, row_slot)
    bits = b.Squeeze(unpacked_bits(b, b.Unsqueeze(b.cast(words, INT64), b.i64(0))), b.i64(0))
    nodes = _of_row(b, b.ReduceSum(bits, b.i64(1), keepdims=0))
    chain = b.Min(b.Add(own, one), start)
    position = b.Where(b.Less(own, start), own, b.Sub(b.Add(start, nodes), one))
    recent = b.scalar(int(attributes["recent_tokens"]) - 1, np.int64)
    late = b.Min(b.Max(b.Sub(position, recent), zero), chain)
    first = b.scalar(int(attributes["first_tokens"]), np.int64)
    seen = b.Add(chain, nodes)
    kept = b.Sub(seen, b.Max(b.Sub(late, first), zero))
    num_listed = b.Min(seen, b.Add(kept, b.Max(allowed, zero)))
    return _Row(start, bits, chain, first, late, kept, num_listed)


def _right(b: BodyBuilder, slots: ir.Value, row: _Row) -> ir.Value:
    """Return whether each entry of the lists int64 [T, N, S] is valid for a sparse row."""
    one, minus = b.scalar(1, np.int64), b.scalar(-1, np.int64)
    rows_and_lists = b.Shape(slots, start=0, end=2)
    held = b.Squeeze(b.size(slots, 2), b.i64(0))
    last_bit = b.Sub(b.Squeeze(b.size(row.bits, 1), b.i64(0)), one)
    node = b.Sub(slots, row.start)
    column = b.Max(b.Min(node, last_bit), b.scalar(0, np.int64))
    spread = b.Concat(rows_and_lists, b.size(row.bits, 1), axis=0)
    bit = b.GatherElements(b.Expand(b.Unsqueeze(row.bits, b.i64(1)), spread), column, axis=2)
    in_tree = b.And(b.GreaterOrEqual(slots, row.start), b.LessOrEqual(node, last_bit))
    seen = b.Or(b.And(in_tree, b.Equal(bit, one)), b.Less(slots, row.chain))
    # Slots rise from −1 on: none is negative, and none occurs twice.
    none = b.Expand(minus, b.Concat(rows_and_lists, b.i64(1), axis=0))
    before = b.Concat(none, b.Slice(slots, b.i64(0), b.i64(-1), b.i64(2)), axis=2)
    entry = b.And(seen, b.Greater(slots, before))

    filled = b.Less(b.Range(b.scalar(0, np.int64), held, one), row.num_listed)
    must = b.And(filled, b.Or(b.Less(slots, row.first), b.GreaterOrEqual(slots, row.late)))
    keeps = b.ReduceSum(b.cast(must, INT64), b.i64(2), keepdims=1)
    enough = b.And(b.Equal(keeps, row.kept), b.LessOrEqual(row.num_listed, held))
    padded = b.And(b.Not(filled), b.Equal(slots, minus))
    return b.And(b.Or(b.And(filled, entry), padded), enough)


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """Return the standard-ONNX body's outputs."""
    selected, row_start, row_slot, tree_start, words, positions, budget = inputs
    assert selected is not None and row_start is not None and row_slot is not None
    assert tree_start is not None and words is not None
    assert positions is not None and budget is not None
    zero, one = b.scalar(0, np.int64), b.scalar(1, np.int64)
    place = rows_of(b, row_start, row_slot, single=False).place
    assert place is not None
    sequence = b.Squeeze(b.slice(place, 0, 1, 0), b.i64(0))
    allowed = _of_row(b, b.Gather(budget, sequence))
    start = _of_row(b, b.Gather(tree_start, sequence))
    row = _row(b, row_slot, start, words, allowed, attributes)

    slots = b.cast(selected, INT64)
    rank = b.Range(zero, b.Squeeze(b.size(slots, 2), b.i64(0)), one)
    mark = b.Where(b.Equal(rank, zero), b.scalar(WHOLE, np.int64), b.scalar(-1, np.int64))
    reached = b.GreaterOrEqual(
        _of_row(b, positions), b.scalar(int(attributes["threshold"]), np.int64)
    )
    sparse = b.And(reached, b.GreaterOrEqual(allowed, zero))
    marked = b.And(b.Not(sparse), b.Equal(slots, mark))
    right = b.Or(b.And(sparse, _right(b, slots, row)), marked)
    wrong = b.ReduceMax(b.cast(b.Not(right), INT32), b.i64(2), keepdims=0)
    wrong_lists = b.ReduceSum(wrong, b.i64(1), keepdims=0)

    # Padding rows belong to no sequence.
    number = b.Range(zero, b.Squeeze(b.size(row_slot, 0), b.i64(0)), one)
    begin = b.Unsqueeze(b.cast(row_start, INT64), b.i64(1))
    at_least = b.GreaterOrEqual(number, b.Slice(begin, b.i64(0), b.i64(-1), b.i64(0)))
    below = b.Less(number, b.Slice(begin, b.i64(1), b.i64(2**31), b.i64(0)))
    member = b.cast(b.And(at_least, below), INT32)
    violations = b.ReduceSum(b.Mul(member, wrong_lists), b.i64(1), keepdims=0)
    broken = b.Greater(_of_row(b, b.Gather(violations, sequence)), zero)
    return [b.Where(broken, b.cast(mark, INT32), selected), violations]
