"""DsaIndexer in standard ops, inside an ``If``: short contexts are not sparse.

After equal expressions are merged, layers share everything but the scores. The pool must hold
finite values everywhere, as for PagedTreeAttention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder, static_size
from specbuild.plugins_cuda.paged_tree_attention.body import (
    HIDDEN,
    INT64,
    WHOLE,
    Rows,
    additive_mask,
    per_sequence,
    rows_of,
)

INT32 = ir.DataType.INT32


def list_length(keys: int, words: int, top_k: int, first_tokens: int, recent_tokens: int) -> int:
    """Return the entries of a row's list: mandatory and selected ones of ``keys`` slots."""
    return min(keys, first_tokens + recent_tokens + 32 * words + top_k)


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """Return the body's outputs; the pool's axes are (1, pages, page_size, d_idx)."""
    key_pool, page_table, words, positions, budget = (inputs[i] for i in (2, 3, 7, 8, 9))
    assert key_pool is not None and page_table is not None and words is not None
    assert positions is not None and budget is not None
    keys = b.Mul(b.size(page_table, 2), b.i64(static_size(key_pool, 2)))
    longest = sum(int(attributes[name]) for name in ("first_tokens", "recent_tokens", "top_k"))
    held = b.Min(keys, b.Add(b.Mul(b.size(words, 1), b.i64(32)), b.i64(longest)))
    is_requested = b.GreaterOrEqual(
        b.ReduceMax(budget, b.i64(0), keepdims=0), b.scalar(0, np.int32)
    )
    furthest = b.ReduceMax(positions, b.i64(0), keepdims=0)
    reached = b.GreaterOrEqual(furthest, b.scalar(int(attributes["threshold"]), np.int32))
    return [
        b.branch(
            b.And(is_requested, reached),
            lambda inner: _lists(inner, inputs, attributes, keys, held),
            lambda inner: _nothing_sparse(inner, inputs, held),
        )
    ]


def _nothing_sparse(b: BodyBuilder, inputs: Sequence[ir.Value | None], held: ir.Value) -> ir.Value:
    """Return int32 [T, N, S] in which every list is the mark of a whole row."""
    q, page_table = inputs[0], inputs[3]
    assert q is not None and page_table is not None
    one = b.i64(1)
    lists = b.Concat(b.size(q, 0), b.size(page_table, 1), axis=0)
    mark = b.Expand(b.scalar(WHOLE, np.int32), b.Concat(lists, one, axis=0))
    rest = b.Expand(b.scalar(-1, np.int32), b.Concat(lists, b.Sub(held, one), axis=0))
    return b.Concat(mark, rest, axis=2)


def _scores(
    b: BodyBuilder, q: ir.Value, head_weights: ir.Value | None, cached: ir.Value, rows: Rows
) -> ir.Value:
    """Return fp32 [B, N, R, S]: scores of ``q`` [T, n_idx, d] for ``cached`` [B, N, S, d]."""
    heads, width = static_size(q, 1), static_size(q, 2)
    queries = b.reshape(per_sequence(b, q, rows), 0, 1, -1, width)
    products = b.Relu(b.MatMul(queries, b.Transpose(cached, perm=[0, 1, 3, 2])))
    sizes = b.Concat(b.i64(0, 0), rows.count, b.i64(heads, -1), axis=0)
    products = b.Reshape(products, sizes)
    if head_weights is not None:
        weights = per_sequence(b, head_weights, rows)
        products = b.Mul(products, b.Unsqueeze(weights, b.i64(1, 4)))
    return b.ReduceSum(products, b.i64(3), keepdims=0)


def _lists(
    b: BodyBuilder,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any],
    keys: ir.Value,
    held: ir.Value,
) -> ir.Value:
    """Return int32 [T, N, S]; ``keys`` and ``held`` are int64 [1]."""
    q, head_weights, key_pool, page_table, row_start, row_slot = inputs[:6]
    tree_start, words, positions, budget = inputs[6:]
    assert q is not None and key_pool is not None and page_table is not None
    assert row_start is not None and row_slot is not None and tree_start is not None
    assert words is not None and positions is not None and budget is not None
    zero, one = b.scalar(0, np.int64), b.scalar(1, np.int64)
    rows = rows_of(b, row_start, row_slot, single=False)
    count = b.Squeeze(keys, b.i64(0))
    recent = int(attributes["recent_tokens"])
    view = (b, rows, count, row_slot, tree_start, words)
    seen = b.Greater(additive_mask(*view, 0), b.scalar(HIDDEN / 2))
    near = b.Greater(additive_mask(*view, recent), b.scalar(HIDDEN / 2))
    slot = b.Range(zero, count, one)
    start = b.reshape(b.cast(tree_start, INT64), -1, 1, 1)
    first = b.Less(slot, b.scalar(int(attributes["first_tokens"]), np.int64))
    kept = b.Or(near, b.And(seen, b.Or(first, b.GreaterOrEqual(slot, start))))

    width = static_size(key_pool, 3)
    pool = b.Squeeze(key_pool, b.i64(0))
    sizes = b.Concat(b.Shape(page_table, start=0, end=2), keys, b.i64(width), axis=0)
    cached = b.Reshape(b.Gather(pool, page_table, axis=0), sizes)
    scores = _scores(b, q, head_weights, cached, rows)
    scores = b.Where(b.Unsqueeze(kept, b.i64(1)), b.scalar(np.inf), scores)
    scores = b.Where(b.Unsqueeze(seen, b.i64(1)), scores, b.scalar(-np.inf))

    def number(mask: ir.Value) -> ir.Value:
        return b.ReduceSum(b.cast(mask, INT64), b.i64(2), keepdims=1)

    budgets = b.reshape(b.cast(budget, INT64), -1, 1, 1)
    num_listed = b.Min(number(seen), b.Add(number(kept), budgets))
    _, ids = b.topk(scores, held)
    rank = b.Range(zero, b.Squeeze(held, b.i64(0)), one)
    selected = b.Unsqueeze(b.Less(rank, num_listed), b.i64(1))
    # Slots that are not selected are sorted last.
    rising, _ = b.topk(b.Where(selected, ids, count), held, largest=False)
    lists = b.Where(b.Less(rising, count), rising, b.scalar(-1, np.int64))

    position = b.Unsqueeze(b.cast(per_sequence(b, positions, rows), INT64), b.i64(2))
    threshold = b.scalar(int(attributes["threshold"]), np.int64)
    sparse = b.And(b.GreaterOrEqual(position, threshold), b.GreaterOrEqual(budgets, zero))
    unmarked = b.Where(b.Equal(rank, zero), b.scalar(WHOLE, np.int64), b.scalar(-1, np.int64))
    lists = b.Where(b.Unsqueeze(sparse, b.i64(1)), lists, unmarked)
    assert rows.place is not None
    by_row = b.Transpose(lists, perm=[0, 2, 1, 3])
    return b.cast(b.GatherND(by_row, b.Transpose(rows.place, perm=[1, 0])), INT32)
