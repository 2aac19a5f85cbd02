"""PagedTreeAttention in standard ops: gather pages, one masked softmax per row, gather rows back.

The parts that do not depend on q, the pools or the sinks (indices, the mask) are equal in all
layers of a cache group. A later pass merges equal expressions, so the layers share them. The pools
must hold finite values everywhere: invisible keys get weight 0, and 0 · NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import CONTRIB_DOMAIN, BodyBuilder, static_size
from specbuild.plugins_cuda.kv_write.codes import decoded, holds_codes

INT64 = ir.DataType.INT64

# Added to the score of an invisible key. It is finite, so that padding rows do not give NaN.
HIDDEN = -3e38

# The first entry of a list of slots that restricts nothing.
WHOLE = -2


@dataclass(frozen=True)
class Rows:
    """The launch's rows by sequence, [B, R]; a single sequence needs no layout."""

    batch: ir.Value | None
    """B as an int64 [1], None for one sequence."""
    count: ir.Value
    """R as an int64 [1]."""
    padded: ir.Value | None
    """The row at [b, r], clipped to an existing one, int64 [B, R]."""
    place: ir.Value | None
    """The sequence and the offset of every row, int64 [2, T]."""


def rows_of(b: BodyBuilder, row_start: ir.Value, row_slot: ir.Value, *, single: bool) -> Rows:
    """Return the layout of this launch's rows over its sequences."""
    total = b.size(row_slot, 0)
    if single:
        return Rows(None, total, None, None)
    start = b.cast(row_start, INT64)
    first = b.Slice(start, b.i64(0), b.i64(-1), b.i64(0))
    stop = b.Slice(start, b.i64(1), b.i64(2**31), b.i64(0))
    one, zero = b.scalar(1, np.int64), b.scalar(0, np.int64)
    longest = b.Max(b.ReduceMax(b.Sub(stop, first), b.i64(0), keepdims=0), one)
    offset = b.Range(zero, longest, one)
    last = b.Sub(total, one)
    padded = b.Min(b.Add(b.Unsqueeze(first, b.i64(1)), offset), last)
    row = b.Range(zero, b.Squeeze(total, b.i64(0)), one)
    passed = b.cast(b.LessOrEqual(b.Unsqueeze(stop, b.i64(1)), row), INT64)
    sequence = b.Min(b.ReduceSum(passed, b.i64(0), keepdims=0), b.Sub(b.size(first, 0), one))
    within = b.Min(b.Sub(row, b.Gather(first, sequence)), b.Sub(longest, one))
    place = b.Concat(
        b.Unsqueeze(sequence, b.i64(0)), b.Unsqueeze(b.Max(within, zero), b.i64(0)), axis=0
    )
    return Rows(b.size(first, 0), b.Unsqueeze(longest, b.i64(0)), padded, place)


def per_sequence(b: BodyBuilder, x: ir.Value, rows: Rows) -> ir.Value:
    """Return ``x`` [T, …] as [B, R, …]."""
    if rows.padded is None:
        return b.Unsqueeze(x, b.i64(0))
    return b.Gather(x, rows.padded, axis=0)


def unpacked_bits(b: BodyBuilder, words: ir.Value) -> ir.Value:
    """Return the bits of ``words`` int64 [B, R, W] as 0 and 1, int64 [B, R, 32·W]."""
    unsigned = b.Unsqueeze(b.Mod(words, b.scalar(2**32, np.int64)), b.i64(3))
    powers = b.constant([2**bit for bit in range(32)], np.int64)
    bits = b.Mod(b.Div(unsigned, powers), b.scalar(2, np.int64))
    return b.reshape(bits, 0, 0, -1)


def ancestor_table(
    b: BodyBuilder, words: ir.Value, window: int
) -> tuple[ir.Value, ir.Value | None]:
    """Return the additive mask of the tree's keys and, with a window, the depth of every row.

    The mask is fp32 [B, R, 32·W + 1] for ``words`` int64 [B, R, W]; its last column hides. The
    depths are int64 [B, R, 1]: the number of ancestors of a node without itself.
    """
    bits = unpacked_bits(b, words)
    visible = b.cast(bits, ir.DataType.BOOL)
    depth = None
    if window > 0:
        before = b.CumSum(bits, b.scalar(2, np.int64), exclusive=1)
        count = b.ReduceSum(bits, b.i64(2), keepdims=1)
        # A row without bits has the position of the first tree slot.
        depth = b.Max(b.Sub(count, b.scalar(1, np.int64)), b.scalar(0, np.int64))
        near = b.Less(b.Sub(depth, before), b.scalar(window, np.int64))
        visible = b.And(visible, near)
    hidden = b.scalar(HIDDEN)
    table = b.Where(visible, b.scalar(0.0), hidden)
    return b.Pad(table, b.i64(0, 0, 0, 0, 0, 1), hidden), depth


def additive_mask(
    b: BodyBuilder,
    rows: Rows,
    keys: ir.Value,
    row_slot: ir.Value,
    tree_start: ir.Value,
    ancestor_bits: ir.Value,
    window: int,
) -> ir.Value:
    """Return fp32 [B, R, S]: 0 where the view slot is visible to the row, else :data:`HIDDEN`.

    ``keys`` is S as an int64 scalar.
    """
    one = b.scalar(1, np.int64)
    slot = b.Range(b.scalar(0, np.int64), keys, one)
    own = b.Unsqueeze(b.cast(per_sequence(b, row_slot, rows), INT64), b.i64(2))
    start = b.reshape(b.cast(tree_start, INT64), -1, 1, 1)
    words = b.cast(per_sequence(b, ancestor_bits, rows), INT64)
    table, depth = ancestor_table(b, words, window)
    # The last column is for slots without a bit: index -1 and those past the end.
    past = b.Sub(b.size(table, 2), one)
    column = b.Max(b.Min(b.Sub(slot, start), past), b.scalar(-1, np.int64))
    if rows.batch is None:
        tree = b.Gather(table, b.reshape(column, -1), axis=2)
    else:
        shape = b.Concat(rows.batch, rows.count, b.size(slot, 0), axis=0)
        tree = b.GatherElements(table, b.Expand(column, shape), axis=2)
    chain = b.LessOrEqual(slot, b.Min(own, b.Sub(start, one)))
    if depth is not None:
        position = b.Where(b.Less(own, start), own, b.Add(start, depth))
        oldest = b.Sub(position, b.scalar(window, np.int64))
        chain = b.And(chain, b.Greater(slot, oldest))
    return b.Where(chain, b.scalar(0.0), tree)


def keep_selected(b: BodyBuilder, mask: ir.Value, rows: Rows, selected: ir.Value) -> ir.Value:
    """Return the mask [B, R, S] restricted to the view slots in ``selected`` [T, N, n].

    The result is [B, R, S] if all KV heads share a list, else [N or 1, B, R, S]. Lists that
    restrict nothing, such as all lists below a threshold, cost almost nothing.
    """
    alone = static_size(selected, 1) == 1
    begins = b.slice(selected, 0, 1, 2)
    sparse = b.Not(b.Equal(begins, b.scalar(WHOLE, np.int32)))
    any_sparse = b.ReduceMax(b.cast(sparse, ir.DataType.INT32), b.i64(0, 1, 2), keepdims=0)
    return b.branch(
        b.cast(any_sparse, ir.DataType.BOOL),
        lambda inner: _sparse(inner, mask, rows, selected, alone=alone),
        lambda inner: inner.Identity(mask) if alone else inner.Unsqueeze(mask, inner.i64(0)),
    )


def _sparse(
    b: BodyBuilder, mask: ir.Value, rows: Rows, selected: ir.Value, *, alone: bool
) -> ir.Value:
    picks = b.cast(per_sequence(b, selected, rows), INT64)
    picks = b.Squeeze(picks, b.i64(2)) if alone else b.Transpose(picks, perm=[2, 0, 1, 3])
    keys = b.size(mask, 2)
    shape = b.Concat(b.Shape(picks, start=0, end=-1), b.Add(keys, b.i64(1)), axis=0)
    none = b.Expand(b.scalar(HIDDEN), shape)
    target = b.Where(b.Less(picks, b.scalar(0, np.int64)), keys, picks)
    zeros = b.Expand(b.scalar(0.0), b.Shape(target))
    chosen = b.ScatterElements(none, target, zeros, axis=-1)
    chosen = b.Slice(chosen, b.i64(0), keys, b.i64(-1))
    whole = b.Equal(b.Slice(picks, b.i64(0), b.i64(1), b.i64(-1)), b.scalar(WHOLE, np.int64))
    return b.Min(mask, b.Where(whole, b.scalar(0.0), chosen))


def gathered(b: BodyBuilder, pool: ir.Value, page_table: ir.Value, *, single: bool) -> ir.Value:
    """Return the pool's pages in view order: [kv_heads, S, width], or [kv_heads, B, S, width].

    A quantized pool is dequantized.
    """
    heads, width = static_size(pool, 0), static_size(pool, 3)
    shape = (heads, -1, width) if single else (heads, 0, -1, width)
    if static_size(page_table, 1) == 1:
        pages = b.reshape(page_table, -1) if single else b.Squeeze(page_table, b.i64(1))
        entries = b.Gather(pool, pages, axis=1)
    else:
        # One view per head: the pages of all heads in one row, those of head h from h · pages on.
        flat = b.reshape(pool, -1, static_size(pool, 2), width)
        head = b.constant([[[h]] for h in range(heads)], np.int64)
        base = b.Mul(head, b.size(pool, 1))
        views = b.Transpose(b.cast(page_table, INT64), perm=[1, 0, 2])
        entries = b.Gather(flat, b.Add(views, base), axis=0)
    if holds_codes(pool):
        entries = decoded(b, entries)
    if single:
        return b.reshape(entries, *shape)
    # The axis B·P must be distinguished from S = P · page_size: B comes from the table.
    sizes = b.Concat(b.i64(heads), b.size(page_table, 0), b.i64(-1, width), axis=0)
    return b.Reshape(entries, sizes)


def grouped_rows(b: BodyBuilder, rows: Rows, group: int) -> tuple[ir.Value, ir.Value]:
    """Return the source of each element between [group · T] and [B, group · R], both ways."""
    assert rows.padded is not None and rows.place is not None
    member = b.constant([[g] for g in range(group)], np.int64)
    total = b.size(rows.place, 1)
    forth = b.Add(b.Unsqueeze(rows.padded, b.i64(1)), b.Mul(member, total))
    forth = b.reshape(forth, 0, -1)
    sequence, within = b.Split(rows.place, outputs=2, axis=0, num_outputs=2)
    block = b.Mul(b.Add(b.Mul(sequence, b.scalar(group, np.int64)), member), rows.count)
    return forth, b.reshape(b.Add(block, within), -1)


def sink_heads(b: BodyBuilder, rows: Rows, kv_heads: int, group: int) -> ir.Value:
    """Return the query head of every score row: int64 [kv_heads, (B,) group · R, 1]."""
    heads = b.constant(np.arange(kv_heads * group).reshape(kv_heads, group, 1), np.int64)
    spread = b.Expand(heads, b.Concat(b.i64(1, 1), rows.count, axis=0))
    if rows.batch is None:
        return b.reshape(spread, kv_heads, -1, 1)
    column = b.reshape(spread, kv_heads, 1, -1, 1)
    return b.Expand(column, b.Concat(b.i64(1), rows.batch, b.i64(1, 1), axis=0))


def softmax_with_sinks(
    b: BodyBuilder, scores: ir.Value, sinks: ir.Value, heads: ir.Value
) -> ir.Value:
    """Return the softmax of [scores | the head's sink] along the last axis, without the sink."""
    joined = b.Concat(scores, b.Gather(sinks, heads), axis=-1)
    return b.Slice(b.Softmax(joined, axis=-1), b.i64(0), b.i64(-1), b.i64(-1))


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """Return the body's outputs; the pools' axes are (kv_heads, pages, page_size, width).

    If the batch axis of ``page_table`` is the static 1, the body is for one sequence. Otherwise it
    pads every sequence to the longest one.
    """
    q, k_pool, v_pool, page_table, row_start, row_slot, tree_start, words = inputs[:8]
    sinks, selected = inputs[8:]
    assert q is not None and k_pool is not None and v_pool is not None
    assert page_table is not None and row_start is not None and row_slot is not None
    assert tree_start is not None and words is not None
    single = page_table.shape is not None and page_table.shape[0] == 1
    kv_heads, page_size = static_size(k_pool, 0), static_size(k_pool, 2)
    q_heads, width, v_width = static_size(q, 1), static_size(q, 2), static_size(v_pool, 3)
    group = q_heads // kv_heads

    rows = rows_of(b, row_start, row_slot, single=single)
    pages = b.Squeeze(b.size(page_table, 2), b.i64(0))
    keys = b.Mul(pages, b.scalar(page_size, np.int64))
    mask = additive_mask(b, rows, keys, row_slot, tree_start, words, int(attributes["window"]))
    if selected is not None:
        mask = keep_selected(b, mask, rows, selected)
        if single and static_size(selected, 1) > 1:
            mask = b.Squeeze(mask, b.i64(1))
    if group > 1:
        mask = b.Concat(*[mask] * group, axis=-2)

    queries = b.reshape(b.Transpose(q, perm=[1, 0, 2]), kv_heads, -1, width)
    if not single:
        forth, back = grouped_rows(b, rows, group)
        queries = b.Gather(queries, forth, axis=1)
    k = gathered(b, k_pool, page_table, single=single)
    v = gathered(b, v_pool, page_table, single=single)
    scale = float(attributes["scale"])
    scores = b.FusedMatMul(queries, k, domain=CONTRIB_DOMAIN, transB=1, alpha=scale)
    scores = b.Add(scores, mask)
    if sinks is None:
        weights = b.Softmax(scores, axis=-1)
    else:
        weights = softmax_with_sinks(b, scores, sinks, sink_heads(b, rows, kv_heads, group))
    attended = b.MatMul(weights, v)
    if not single:
        attended = b.Gather(b.reshape(attended, kv_heads, -1, v_width), back, axis=1)
    attended = b.reshape(attended, q_heads, -1, v_width)
    return [b.Transpose(attended, perm=[1, 0, 2])]
