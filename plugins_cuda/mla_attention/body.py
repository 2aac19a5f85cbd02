"""MlaAttention in standard ops: the mask and row layout are those of PagedTreeAttention.

The keys of the complete view are rebuilt in every call. The pool must hold finite values
everywhere: invisible keys get weight 0, and 0 · NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import CONTRIB_DOMAIN, BodyBuilder, static_size
from specbuild.plugins_cuda.paged_tree_attention.body import (
    INT64,
    Rows,
    additive_mask,
    gathered,
    grouped_rows,
    keep_selected,
    per_sequence,
    rows_of,
    sink_heads,
    softmax_with_sinks,
    unpacked_bits,
)


@dataclass(frozen=True)
class Rebuild:
    """The parameters of rebuilt keys: weights [L, Hkv, D], biases [Hkv, D], and rotary tables."""

    w_k: ir.Value
    b_k: ir.Value | None
    cos: ir.Value
    sin: ir.Value


def slot_positions(
    b: BodyBuilder, page_table: ir.Value, page_position: ir.Value | None, page_size: int
) -> ir.Value:
    """Return the position of every view slot as if it were committed, int64 [B, S]."""
    one, zero = b.scalar(1, np.int64), b.scalar(0, np.int64)
    if page_position is None:
        pages = b.Range(zero, b.Squeeze(b.size(page_table, 2), b.i64(0)), one)
        begins = b.Mul(b.Unsqueeze(pages, b.i64(0)), b.scalar(page_size, np.int64))
        begins = b.Expand(begins, b.Concat(b.size(page_table, 0), b.i64(1), axis=0))
    else:
        begins = b.cast(page_position, INT64)
    offsets = b.constant(range(page_size), np.int64)
    return b.reshape(b.Add(b.Unsqueeze(begins, b.i64(2)), offsets), 0, -1)


def key_positions(
    b: BodyBuilder,
    rows: Rows,
    committed: ir.Value,
    row_start: ir.Value,
    tree_start: ir.Value,
    ancestor_bits: ir.Value,
    cos: ir.Value,
) -> ir.Value:
    """Return the position of every view slot, int64 [B, S], limited to the rotary tables.

    ``committed`` is :func:`slot_positions`. The depth of a tree slot is the number of lower
    ancestors in any row that has its bit. Rows that pad a sequence to the longest one belong to
    other sequences and do not count.
    """
    one, zero = b.scalar(1, np.int64), b.scalar(0, np.int64)
    bits = unpacked_bits(b, b.cast(per_sequence(b, ancestor_bits, rows), INT64))
    depth = b.Mul(b.CumSum(bits, b.scalar(2, np.int64), exclusive=1), bits)
    if rows.batch is not None:
        start = b.cast(row_start, INT64)
        first = b.Slice(start, b.i64(0), b.i64(-1), b.i64(0))
        stop = b.Slice(start, b.i64(1), b.i64(2**31), b.i64(0))
        offset = b.Range(zero, b.Squeeze(rows.count, b.i64(0)), one)
        own = b.Less(offset, b.Unsqueeze(b.Sub(stop, first), b.i64(1)))
        depth = b.Mul(depth, b.Unsqueeze(b.cast(own, INT64), b.i64(2)))
    depth = b.ReduceMax(depth, b.i64(1), keepdims=0)
    keys = b.Squeeze(b.size(committed, 1), b.i64(0))
    start = b.reshape(b.cast(tree_start, INT64), -1, 1)
    column = b.Sub(b.Range(zero, keys, one), start)
    last = b.Sub(b.size(depth, 1), one)
    within = b.Max(b.Min(column, last), zero)
    root = b.GatherElements(committed, b.Min(start, b.Sub(keys, one)), axis=1)
    tree = b.Add(root, b.GatherElements(depth, within, axis=1))
    position = b.Where(b.Less(column, zero), committed, tree)
    return b.Min(position, b.scalar(static_size(cos, 0) - 1, np.int64))


def rebuilt_keys(
    b: BodyBuilder, latent: ir.Value, rebuild: Rebuild, positions: ir.Value, *, single: bool
) -> ir.Value:
    """Convert ``latent`` [B, S, L] to rotated keys [Hkv, S, D], or [Hkv, B, S, D]."""
    return rotated_keys(b, key_product(b, latent, rebuild), rebuild, positions, single=single)


def key_product(b: BodyBuilder, latent: ir.Value, rebuild: Rebuild) -> ir.Value:
    """Convert ``latent`` [B, S, L] to keys [B, S, Hkv·D] without bias and RoPE."""
    size, heads, width = (static_size(rebuild.w_k, axis) for axis in range(3))
    return b.MatMul(latent, b.reshape(rebuild.w_k, size, heads * width))


def rotated_keys(
    b: BodyBuilder, k: ir.Value, rebuild: Rebuild, positions: ir.Value, *, single: bool
) -> ir.Value:
    """Add the bias to a :func:`key_product` and rotate it: [Hkv, S, D], or [Hkv, B, S, D].

    Every slot is a sequence of one for the rotation, because ONNX Runtime refuses sequences that
    are longer than its tables. Padding pages can make views that long.
    """
    _, heads, width = (static_size(rebuild.w_k, axis) for axis in range(3))
    if rebuild.b_k is not None:
        k = b.Add(k, b.reshape(rebuild.b_k, heads * width))
    slots = b.reshape(k, -1, heads, 1, width)
    turned = b.RotaryEmbedding(slots, rebuild.cos, rebuild.sin, b.reshape(positions, -1, 1))
    by_head = b.Transpose(b.reshape(turned, -1, heads, width), perm=[1, 0, 2])
    if single:
        return by_head
    sizes = b.Concat(b.i64(heads), b.Shape(positions), b.i64(width), axis=0)
    return b.Reshape(by_head, sizes)


def values_of(
    b: BodyBuilder, mixed: ir.Value, mass: ir.Value, w_v: ir.Value, b_v: ir.Value | None
) -> ir.Value:
    """Convert ``mixed`` [Hq, T, Lv] and ``mass`` [Hq, T, 1] to attended [T, Hq, Dv]."""
    v_latent, v_heads, v_width = (static_size(w_v, axis) for axis in range(3))
    weight = b.Transpose(w_v, perm=[1, 0, 2])
    if b_v is not None:
        mixed = b.Concat(mixed, mass, axis=2)
        weight = b.Concat(weight, b.reshape(b_v, v_heads, 1, v_width), axis=1)
        v_latent += 1
    attended = b.MatMul(b.reshape(mixed, v_heads, -1, v_latent), weight)
    rows = b.size(mixed, 1)
    sizes = b.Concat(b.i64(-1), rows, b.i64(v_width), axis=0)
    return b.Transpose(b.Reshape(attended, sizes), perm=[1, 0, 2])


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """Return the body's outputs; the pool's axes are (1, pages, page_size, latent).

    If the batch axis of ``page_table`` is the static 1, the body is for one sequence. Otherwise it
    pads every sequence to the longest one.
    """
    q, c_pool, w_k, b_k, w_v, b_v, cos, sin = inputs[:8]
    page_table, row_start, row_slot, tree_start, words, sinks, selected = inputs[8:15]
    assert q is not None and c_pool is not None and w_v is not None and page_table is not None
    assert row_start is not None and row_slot is not None
    assert tree_start is not None and words is not None
    single = page_table.shape is not None and page_table.shape[0] == 1
    kv_heads = 1 if w_k is None else static_size(w_k, 1)
    q_heads, width, v_latent = static_size(q, 1), static_size(q, 2), static_size(w_v, 0)
    group = q_heads // kv_heads

    rows = rows_of(b, row_start, row_slot, single=single)
    pages = b.Squeeze(b.size(page_table, 2), b.i64(0))
    keys = b.Mul(pages, b.scalar(static_size(c_pool, 2), np.int64))
    mask = additive_mask(b, rows, keys, row_slot, tree_start, words, int(attributes["window"]))
    if selected is not None:
        mask = keep_selected(b, mask, rows, selected)
    mask = b.Concat(*[mask] * group, axis=1) if group > 1 else mask

    queries = b.reshape(b.Transpose(q, perm=[1, 0, 2]), kv_heads, -1, width)
    if not single:
        forth, back = grouped_rows(b, rows, group)
        queries = b.Gather(queries, forth, axis=1)
    entries = gathered(b, c_pool, page_table, single=single)
    latent = entries if single else b.Squeeze(entries, b.i64(0))
    k = entries
    if w_k is not None:
        assert cos is not None and sin is not None
        committed = slot_positions(b, page_table, inputs[15], static_size(c_pool, 2))
        positions = key_positions(b, rows, committed, row_start, tree_start, words, cos)
        k = rebuilt_keys(b, latent, Rebuild(w_k, b_k, cos, sin), positions, single=single)
    scale = float(attributes["scale"])
    scores = b.FusedMatMul(queries, k, domain=CONTRIB_DOMAIN, transB=1, alpha=scale)
    scores = b.Add(scores, mask)
    if sinks is None:
        weights = b.Softmax(scores, axis=-1)
    else:
        weights = softmax_with_sinks(b, scores, sinks, sink_heads(b, rows, kv_heads, group))
    if v_latent < static_size(c_pool, 3):
        latent = b.slice(latent, 0, v_latent, 2)
    mixed, mass = b.MatMul(weights, latent), b.ReduceSum(weights, b.i64(-1), keepdims=1)
    if not single:
        mixed = b.Gather(b.reshape(mixed, kv_heads, -1, v_latent), back, axis=1)
        mass = b.Gather(b.reshape(mass, kv_heads, -1, 1), back, axis=1)
    mixed, mass = b.reshape(mixed, q_heads, -1, v_latent), b.reshape(mass, q_heads, -1, 1)
    return [values_of(b, mixed, mass, w_v, b_v)]
