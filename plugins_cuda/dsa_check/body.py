"""DsaCheck in standard ops: what a row sees and must keep is counted, never listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """The standard-ONNX form: every number [T, N, S], [T, 1, S] or [T, 1, 1]."""
    selected, row_start, row_slot, tree_start, words, positions, budget = inputs
    assert selected is not None and row_start is not None and row_slot is not None
    assert tree_start is not None and words is not None
    assert positions is not None and budget is not None
    zero, one = b.scalar(0, np.int64), b.scalar(1, np.int64)
    rows = rows_of(b, row_start, row_slot, single=False)
    assert rows.place is not None
    sequence = b.Squeeze(b.slice(rows.place, 0, 1, 0), b.i64(0))

    def of_row(x: ir.Value) -> ir.Value:
        return b.reshape(b.cast(x, INT64), -1, 1, 1)

    start = of_row(b.Gather(tree_start, sequence))
    allowed = of_row(b.Gather(budget, sequence))
    position, own = of_row(positions), of_row(row_slot)
    bits = b.Squeeze(unpacked_bits(b, b.Unsqueeze(b.cast(words, INT64), b.i64(0))), b.i64(0))
    nodes = of_row(b.ReduceSum(bits, b.i64(1), keepdims=0))

    # Committed slots 0 … chain − 1 are seen; those from `late` on are recent.
    chain = b.Min(b.Add(own, one), start)
    stands = b.Where(b.Less(own, start), own, b.Sub(b.Add(start, nodes), one))
    recent = b.scalar(int(attributes["recent_tokens"]) - 1, np.int64)
    late = b.Min(b.Max(b.Sub(stands, recent), zero), chain)
    first = b.scalar(int(attributes["first_tokens"]), np.int64)
    kept = b.Sub(b.Add(chain, nodes), b.Max(b.Sub(late, first), zero))
    wanted = b.Min(b.Add(chain, nodes), b.Add(kept, b.Max(allowed, zero)))

    slots = b.cast(selected, INT64)
    held = b.Squeeze(b.size(slots, 2), b.i64(0))
    rank = b.Range(zero, held, one)
    in_tree = b.GreaterOrEqual(slots, start)
    last_bit = b.Sub(b.Squeeze(b.size(bits, 1), b.i64(0)), one)
    node = b.Sub(slots, start)
    column = b.Max(b.Min(node, last_bit), zero)
    lists = b.Concat(b.Shape(slots, start=0, end=2), b.size(bits, 1), axis=0)
    bit = b.GatherElements(b.Expand(b.Unsqueeze(bits, b.i64(1)), lists), column, axis=2)
    ancestor = b.And(b.Equal(bit, one), b.LessOrEqual(node, last_bit))
    seen = b.Or(b.And(in_tree, ancestor), b.Less(slots, chain))
    seen = b.And(seen, b.GreaterOrEqual(slots, zero))
    before = b.Concat(
        b.Expand(b.scalar(-1, np.int64), b.Concat(b.Shape(slots, start=0, end=2), b.i64(1), axis=0)),
        b.Slice(slots, b.i64(0), b.i64(-1), b.i64(2)),
        axis=2,
    )
    rising = b.And(seen, b.Greater(slots, before))
    filled = b.Less(rank, wanted)
    padded = b.And(b.Not(filled), b.Equal(slots, b.scalar(-1, np.int64)))
    right = b.Or(b.And(filled, rising), padded)
    must = b.Or(b.Less(slots, first), b.GreaterOrEqual(slots, late))
    keeps = b.ReduceSum(b.cast(b.And(filled, must), INT64), b.i64(2), keepdims=1)
    enough = b.And(b.Equal(keeps, kept), b.LessOrEqual(wanted, held))
    mark = b.Where(b.Equal(rank, zero), b.scalar(WHOLE, np.int64), b.scalar(-1, np.int64))
    threshold = b.scalar(int(attributes["threshold"]), np.int64)
    narrowed = b.And(b.GreaterOrEqual(position, threshold), b.GreaterOrEqual(allowed, zero))
    right = b.Or(
        b.And(narrowed, b.And(right, enough)), b.And(b.Not(narrowed), b.Equal(slots, mark))
    )
    wrong = b.ReduceMax(b.cast(b.Not(right), INT32), b.i64(2), keepdims=0)

    # Padding rows belong to no sequence.
    row = b.Range(zero, b.Squeeze(b.size(row_slot, 0), b.i64(0)), one)
    begin = b.Unsqueeze(b.cast(row_start, INT64), b.i64(1))
    reached = b.GreaterOrEqual(row, b.Slice(begin, b.i64(0), b.i64(-1), b.i64(0)))
    member = b.And(reached, b.Less(row, b.Slice(begin, b.i64(1), b.i64(2**31), b.i64(0))))
    of_rows = b.ReduceSum(wrong, b.i64(1), keepdims=0)
    violations = b.ReduceSum(b.Mul(b.cast(member, INT32), of_rows), b.i64(1), keepdims=0)
    broken = b.Greater(of_row(b.Gather(violations, sequence)), zero)
    checked = b.Where(broken, b.cast(mark, INT32), selected)
    return [checked, violations]
