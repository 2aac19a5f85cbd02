"""KvBlockSummary in standard ops: as many blocks per sequence as the sequence with the most.

Sequences with fewer blocks read page 0 and write its entry, which is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder, static_size

INT64 = ir.DataType.INT64


def entry_pages(b: BodyBuilder, logical_pages: ir.Value, logical: ir.Value) -> ir.Value:
    """Return the page of every logical page int64 [B, n], or 0 past the table: int64 [B, n]."""
    width = b.size(logical_pages, 1)
    inside = b.And(b.Less(logical, width), b.GreaterOrEqual(logical, b.scalar(0, np.int64)))
    place = b.Where(inside, logical, b.scalar(0, np.int64))
    gathered = b.GatherElements(b.cast(logical_pages, INT64), place, axis=1)
    return b.Where(inside, gathered, b.scalar(0, np.int64))


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """Return the body's outputs; the pools' axes are (kv_heads, pages, …)."""
    summary_pool, k_pool, logical_pages, first_block, blocks = inputs
    assert summary_pool is not None and k_pool is not None and logical_pages is not None
    assert first_block is not None and blocks is not None
    sink_pages, block_pages = int(attributes["sink_pages"]), int(attributes["block_pages"])
    heads, width = static_size(k_pool, 0), static_size(k_pool, 3)
    zero, one = b.scalar(0, np.int64), b.scalar(1, np.int64)
    first, end = (b.Unsqueeze(b.cast(x, INT64), b.i64(1)) for x in (first_block, blocks))
    max_new = b.Max(b.ReduceMax(b.Sub(end, first), b.i64(0, 1), keepdims=0), one)
    block = b.Add(first, b.Range(zero, max_new, one))
    start = b.Add(b.Mul(block, b.scalar(block_pages, np.int64)), b.scalar(sink_pages, np.int64))
    start = b.Where(b.Less(block, end), start, b.scalar(-1, np.int64))
    within = b.constant(np.arange(block_pages).reshape(1, 1, -1), np.int64)
    each = b.Unsqueeze(start, b.i64(2))
    logical = b.Where(b.Less(each, zero), each, b.Add(each, within))
    pages = entry_pages(b, logical_pages, b.reshape(logical, 0, -1))
    gathered = b.Gather(k_pool, b.reshape(pages, -1, block_pages), axis=1)
    keys = b.reshape(gathered, heads, 0, -1, width)
    extremes = b.Concat(
        b.ReduceMax(keys, b.i64(2), keepdims=1), b.ReduceMin(keys, b.i64(2), keepdims=1), axis=2
    )
    entry = b.reshape(entry_pages(b, logical_pages, start), 1, -1, 1)
    head = b.constant(np.arange(heads).reshape(-1, 1, 1), np.int64)
    shape = b.Concat(b.i64(heads), b.size(entry, 1), b.i64(1), axis=0)
    indices = b.Concat(b.Expand(head, shape), b.Expand(entry, shape), axis=2)
    return [b.ScatterND(summary_pool, indices, extremes)]
