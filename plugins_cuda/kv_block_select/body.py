"""KvBlockSelect in standard ops, inside an ``If``: most launches select nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder, static_size
from specbuild.plugins_cuda.kv_block_summary.body import entry_pages
from specbuild.plugins_cuda.paged_tree_attention.body import Rows, rows_of

INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64


def best_blocks(
    b: BodyBuilder,
    queries: ir.Value,
    summaries: ir.Value,
    asks: ir.Value,
    sizes: tuple[ir.Value, ir.Value],
    attributes: Mapping[str, Any],
    group: int,
) -> ir.Value:
    """Return scores fp32 [B, kv_heads, M], up to factors that do not affect the order.

    ``queries`` [kv_heads, B, group · R, D], ``summaries`` [kv_heads, B, M, 2, D], ``asks`` bool
    [B, R], ``sizes`` = (R, M), int64 [1] each.
    """
    rows, blocks = sizes
    zero = b.scalar(0.0)

    def dots(x: ir.Value, side: int) -> ir.Value:
        extreme = b.Squeeze(b.slice(summaries, side, side + 1, 3), b.i64(3))
        return b.MatMul(x, b.Transpose(extreme, perm=[0, 1, 3, 2]))

    if attributes["score"] == "quest":
        scores = b.Add(dots(b.Max(queries, zero), 0), dots(b.Min(queries, zero), 1))
    else:
        scores = b.Max(dots(queries, 0), dots(queries, 1))
    scores = b.Reshape(scores, b.Concat(b.i64(0, 0, group), rows, blocks, axis=0))
    is_query = b.Unsqueeze(asks, b.i64(0, 2, 4))
    if attributes["reduction"] == "max":
        over_queries = b.ReduceMax(
            b.Where(is_query, scores, b.scalar(-np.inf)), b.i64(3), keepdims=0
        )
    else:
        over_queries = b.ReduceSum(b.Where(is_query, scores, zero), b.i64(3), keepdims=0)
    return b.Transpose(b.ReduceSum(over_queries, b.i64(2), keepdims=0), perm=[1, 0, 2])


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """Return the body's outputs; the summaries' axes are (kv_heads, pages, 2, width)."""
    blocks, partial_table = inputs[7], inputs[9]
    assert blocks is not None and partial_table is not None
    any_new = b.GreaterOrEqual(b.ReduceMax(blocks, b.i64(0), keepdims=0), b.scalar(0, np.int32))
    return [
        b.branch(
            any_new,
            lambda inner: _selected(inner, inputs, attributes),
            lambda inner: inner.Identity(partial_table),
        )
    ]


def _column(b: BodyBuilder, x: ir.Value) -> ir.Value:
    """Convert int32 [B] to int64 [B, 1]."""
    return b.Unsqueeze(b.cast(x, INT64), b.i64(1))


def _asking(
    b: BodyBuilder, rows: Rows, row_start: ir.Value, slot: ir.Value, count: ir.Value
) -> ir.Value:
    """Return which rows [B, R] are queries: those at tree slots 0 … count − 1, bool."""
    zero, one = b.scalar(0, np.int64), b.scalar(1, np.int64)
    start = b.cast(row_start, INT64)
    own = b.Sub(
        b.Slice(start, b.i64(1), b.i64(2**31), b.i64(0)),
        b.Slice(start, b.i64(0), b.i64(-1), b.i64(0)),
    )
    offset = b.Range(zero, b.Squeeze(rows.count, b.i64(0)), one)
    held = b.Less(offset, b.Unsqueeze(own, b.i64(1)))
    return b.And(held, b.And(b.GreaterOrEqual(slot, zero), b.Less(slot, count)))


def _view(
    b: BodyBuilder,
    entry: ir.Value,
    chosen: ir.Value,
    num_selected: ir.Value,
    count: ir.Value,
    attributes: Mapping[str, Any],
) -> ir.Value:
    """Return the logical page of every entry, int64 [B, kv_heads, V].

    ``chosen`` is int64 [B, kv_heads, k]; the first ``num_selected`` [B, 1] are valid.
    ``count`` [B, 1] blocks are summarized.
    """
    zero, one = b.scalar(0, np.int64), b.scalar(1, np.int64)
    sink = b.scalar(int(attributes["sink_pages"]), np.int64)
    per_block = b.scalar(int(attributes["block_pages"]), np.int64)
    offset = b.Sub(entry, sink)
    last = b.Sub(b.Squeeze(b.size(chosen, 2), b.i64(0)), one)
    at = b.Max(b.Min(b.Div(offset, per_block), last), zero)
    first_page = b.Add(b.Mul(b.Gather(chosen, at, axis=2), per_block), sink)
    retrieved = b.Unsqueeze(b.Mul(num_selected, per_block), b.i64(2))
    passed = b.Unsqueeze(b.Mul(count, per_block), b.i64(2))
    tail = b.Add(b.Sub(entry, retrieved), passed)
    of_chosen = b.Add(first_page, b.Mod(offset, per_block))
    logical = b.Where(b.Less(offset, retrieved), of_chosen, tail)
    return b.Where(b.Less(offset, zero), entry, logical)


def _selected(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> ir.Value:
    q, summary_pool, logical_pages, row_start, row_slot = inputs[:5]
    tree_start, tree_count, blocks, budget, partial_table = inputs[5:]
    assert q is not None and summary_pool is not None and logical_pages is not None
    assert row_start is not None and row_slot is not None and tree_start is not None
    assert tree_count is not None and blocks is not None and budget is not None
    assert partial_table is not None
    kv_heads, width = static_size(summary_pool, 0), static_size(summary_pool, 3)
    group = static_size(q, 1) // kv_heads
    zero, one = b.scalar(0, np.int64), b.scalar(1, np.int64)

    rows = rows_of(b, row_start, row_slot, single=False)
    assert rows.padded is not None
    slot = b.Sub(b.cast(b.Gather(row_slot, rows.padded), INT64), _column(b, tree_start))
    root_alone = attributes["reduction"] == "last"
    asks = _asking(b, rows, row_start, slot, one if root_alone else _column(b, tree_count))
    queries = b.reshape(b.Gather(q, rows.padded, axis=0), 0, 0, kv_heads, group, width)
    queries = b.reshape(b.Transpose(queries, perm=[2, 0, 3, 1, 4]), 0, 0, -1, width)

    count = _column(b, blocks)
    max_blocks = b.Max(b.ReduceMax(count, b.i64(0, 1), keepdims=0), one)
    block = b.Range(zero, max_blocks, one)
    present = b.Less(block, count)
    sink = b.scalar(int(attributes["sink_pages"]), np.int64)
    starts = b.Add(b.Mul(block, b.scalar(int(attributes["block_pages"]), np.int64)), sink)
    starts = b.Where(present, starts, b.scalar(-1, np.int64))
    summaries = b.Gather(summary_pool, entry_pages(b, logical_pages, starts), axis=1)
    sizes = (rows.count, b.Unsqueeze(max_blocks, b.i64(0)))
    scores = best_blocks(b, queries, summaries, asks, sizes, attributes, group)
    scores = b.Where(b.Unsqueeze(present, b.i64(1)), scores, b.scalar(-np.inf))

    num_selected = b.Max(b.Min(_column(b, budget), count), zero)
    widest = b.Max(b.ReduceMax(num_selected, b.i64(0, 1), keepdims=0), one)
    _, ids = b.topk(scores, b.Unsqueeze(widest, b.i64(0)))
    # Blocks past the budget are sorted last.
    rank = b.Range(zero, widest, one)
    ids = b.Where(b.Less(rank, b.Unsqueeze(num_selected, b.i64(2))), ids, max_blocks)
    chosen, _ = b.topk(ids, b.Unsqueeze(widest, b.i64(0)), largest=False)

    entry = b.Range(zero, b.Squeeze(b.size(partial_table, 2), b.i64(0)), one)
    logical = _view(b, entry, chosen, num_selected, count, attributes)
    pages = entry_pages(b, logical_pages, b.reshape(logical, 0, -1))
    table = b.cast(b.reshape(pages, 0, kv_heads, -1), INT32)
    new = b.GreaterOrEqual(b.Unsqueeze(count, b.i64(2)), zero)
    return b.Where(new, table, partial_table)
