"""Attention over pages with the ONNX op ``Attention``, which becomes the library's fused layer.

The mask and the layout of rows are those of the ops' bodies. The activations keep the graph's
dtype, because engines are strongly typed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder, static_size
from specbuild.plugins_cuda.mla_attention.body import (
    Rebuild,
    key_positions,
    key_product,
    rotated_keys,
    slot_positions,
)
from specbuild.plugins_cuda.paged_tree_attention.body import (
    Rows,
    additive_mask,
    gathered,
    keep_selected,
    per_sequence,
    rows_of,
)

Inputs: TypeAlias = Sequence[ir.Value | None]
Attributes: TypeAlias = Mapping[str, Any]
FLOAT = ir.DataType.FLOAT
# Masks a score of this type. The sum with a score is still finite.
MASKED = {ir.DataType.FLOAT: -3e38, ir.DataType.BFLOAT16: -3e38, ir.DataType.FLOAT16: -6e4}


def attention(b: BodyBuilder, inputs: Inputs, attributes: Attributes) -> Sequence[ir.Value]:
    """PagedTreeAttention by ``Attention``; the pools have axes (kv_heads, pages, page_size, width).

    A sink is an additional key with score 0 for every query, a mask equal to the sink's logit, and
    value 0. It therefore contributes only to the softmax's denominator.
    """
    q, k_pool, v_pool, page_table, row_start, row_slot, tree_start, words = inputs[:8]
    sinks, selected = inputs[8:]
    assert q is not None and k_pool is not None and v_pool is not None
    assert page_table is not None and row_start is not None and row_slot is not None
    assert tree_start is not None and words is not None and q.dtype is not None
    single = page_table.shape is not None and page_table.shape[0] == 1
    rows = rows_of(b, row_start, row_slot, single=single)
    pages = b.Squeeze(b.size(page_table, 2), b.i64(0))
    keys = b.Mul(pages, b.scalar(static_size(k_pool, 2), np.int64))
    mask = additive_mask(b, rows, keys, row_slot, tree_start, words, int(attributes["window"]))
    if selected is not None:
        mask = keep_selected(b, mask, rows, selected)
    if selected is not None and static_size(selected, 1) > 1:
        mask = _per_query_head(b, mask, static_size(k_pool, 0), static_size(q, 1))
    else:
        mask = b.Unsqueeze(mask, b.i64(1))
    mask = b.Max(mask, b.scalar(MASKED[q.dtype]))
    k = _keys(b, k_pool, page_table, single=single)
    v = _keys(b, v_pool, page_table, single=single)
    return [_attended(b, q, k, v, mask, sinks, rows, float(attributes["scale"]), q)]


def latent_attention(b: BodyBuilder, inputs: Inputs, attributes: Attributes) -> Sequence[ir.Value]:
    """MlaAttention by ``Attention``; values are rebuilt from latents like keys.

    The layer requires keys and values of one width and one number of heads. The narrower are padded
    with zeros, and the fewer heads are repeated.
    """
    q, c_pool, w_k, b_k, w_v, b_v, cos, sin = inputs[:8]
    page_table, row_start, row_slot, tree_start, words, sinks, selected = inputs[8:15]
    assert q is not None and c_pool is not None and w_v is not None and page_table is not None
    assert row_start is not None and row_slot is not None
    assert tree_start is not None and words is not None and q.dtype is not None
    single = page_table.shape is not None and page_table.shape[0] == 1
    rows = rows_of(b, row_start, row_slot, single=single)
    pages = b.Squeeze(b.size(page_table, 2), b.i64(0))
    keys = b.Mul(pages, b.scalar(static_size(c_pool, 2), np.int64))
    mask = additive_mask(b, rows, keys, row_slot, tree_start, words, int(attributes["window"]))
    if selected is not None:
        mask = keep_selected(b, mask, rows, selected)
    mask = b.Max(b.Unsqueeze(mask, b.i64(1)), b.scalar(MASKED[q.dtype]))
    latent = b.Squeeze(_keys(b, c_pool, page_table, single=single), b.i64(1))
    if w_k is None:
        k = b.Unsqueeze(latent, b.i64(1))
    else:
        assert cos is not None and sin is not None
        committed = slot_positions(b, page_table, inputs[15], static_size(c_pool, 2))
        at = key_positions(b, rows, committed, row_start, tree_start, words, cos)
        k = _rebuilt_keys(b, latent, Rebuild(w_k, b_k, cos, sin), at, q.dtype, single=single)
    v_latent, v_heads, v_width = (static_size(w_v, axis) for axis in range(3))
    value_latent = b.slice(latent, 0, v_latent, 2) if v_latent < static_size(c_pool, 3) else latent
    v = _rebuilt_values(b, value_latent, w_v, b_v)
    kv_heads, width = (1 if w_k is None else static_size(w_k, 1)), static_size(q, 2)
    max_heads, max_width = max(kv_heads, v_heads), max(width, v_width)
    k, v = _repeated(b, k, kv_heads, max_heads), _repeated(b, v, v_heads, max_heads)
    k, v = _padded(b, k, width, max_width), _padded(b, v, v_width, max_width)
    queries, scale = _padded(b, q, width, max_width), float(attributes["scale"])
    attended = _attended(b, queries, k, v, mask, sinks, rows, scale, q)
    return [b.slice(attended, 0, v_width, 2) if v_width < max_width else attended]


def _rebuilt_keys(
    b: BodyBuilder,
    latent: ir.Value,
    rebuild: Rebuild,
    positions: ir.Value,
    dtype: ir.DataType,
    *,
    single: bool,
) -> ir.Value:
    """Rebuild keys from ``latent`` [B, S, L] and rotate them in fp32, [B, kv_heads, S, D]."""
    biased = rebuild if rebuild.b_k is None else replace(rebuild, b_k=b.cast(rebuild.b_k, FLOAT))
    product = b.cast(key_product(b, latent, rebuild), FLOAT)
    k = b.cast(rotated_keys(b, product, biased, positions, single=single), dtype)
    return b.Unsqueeze(k, b.i64(0)) if single else b.Transpose(k, perm=[1, 0, 2, 3])


def _rebuilt_values(
    b: BodyBuilder, latent: ir.Value, w_v: ir.Value, b_v: ir.Value | None
) -> ir.Value:
    """Rebuild values from ``latent`` [B, S, Lv] with their bias, [B, v_heads, S, v_width]."""
    size, heads, width = (static_size(w_v, axis) for axis in range(3))
    v = b.MatMul(latent, b.reshape(w_v, size, heads * width))
    if b_v is not None:
        v = b.Add(v, b.reshape(b_v, heads * width))
    return b.Transpose(b.reshape(v, 0, 0, heads, width), perm=[0, 2, 1, 3])


def _repeated(b: BodyBuilder, x: ir.Value, heads: int, new_heads: int) -> ir.Value:
    """Repeat every head of ``x`` [B, heads, S, width] to ``new_heads`` heads, copies adjacent."""
    if heads == new_heads:
        return x
    shape = b.i64(1, 1, new_heads // heads, 1, 1)
    spread = b.Expand(b.Unsqueeze(x, b.i64(2)), shape)
    sizes = b.Concat(b.size(x, 0), b.i64(new_heads), b.Shape(x, start=2, end=4), axis=0)
    return b.Reshape(spread, sizes)


def _padded(b: BodyBuilder, x: ir.Value, width: int, new_width: int) -> ir.Value:
    """Append zeros to ``x`` [..., width] up to ``new_width``."""
    if width == new_width:
        return x
    zero = b.slice(x, 0, 1, -1)
    shape = b.Concat(b.Shape(x, start=0, end=-1), b.i64(new_width - width), axis=0)
    return b.Concat(x, b.Expand(b.Sub(zero, zero), shape), axis=-1)


def _attended(  # noqa: PLR0917
    b: BodyBuilder,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    mask: ir.Value,
    sinks: ir.Value | None,
    rows: Rows,
    scale: float,
    original_q: ir.Value,
) -> ir.Value:
    """Attend with ``q`` [T, heads, D] to k and v [B, kv_heads, S, D].

    ``original_q`` is the op's input, of which ``q`` is a padded copy.
    """
    assert original_q.dtype is not None
    if sinks is not None:
        mask = _with_sinks(b, mask, sinks, static_size(original_q, 1))
        k, v = _with_zero_key(b, k), _with_zero_key(b, v)
    queries = b.Transpose(per_sequence(b, q, rows), perm=[0, 2, 1, 3])
    attended = b.Attention(queries, k, v, b.cast(mask, original_q.dtype), scale=scale)
    return _flat_rows(b, b.Transpose(attended, perm=[0, 2, 1, 3]), rows)


def _keys(b: BodyBuilder, pool: ir.Value, page_table: ir.Value, *, single: bool) -> ir.Value:
    """Return the pages of every sequence in view order, [B, kv_heads, S, width]."""
    keys = gathered(b, pool, page_table, single=single)
    return b.Unsqueeze(keys, b.i64(0)) if single else b.Transpose(keys, perm=[1, 0, 2, 3])


def _per_query_head(b: BodyBuilder, mask: ir.Value, kv_heads: int, heads: int) -> ir.Value:
    """Expand ``mask`` [kv_heads or 1, B, R, S] to [B, heads, R, S]."""
    group = heads // kv_heads
    spread = b.Expand(
        b.Unsqueeze(b.Transpose(mask, perm=[1, 0, 2, 3]), b.i64(2)),
        b.i64(1, kv_heads, group, 1, 1),
    )
    shape = b.Concat(b.size(mask, 1), b.i64(heads), b.size(mask, 2), b.size(mask, 3), axis=0)
    return b.Reshape(spread, shape)


def _with_sinks(b: BodyBuilder, mask: ir.Value, sinks: ir.Value, heads: int) -> ir.Value:
    """Append the sinks' logits [heads] to ``mask`` [B, 1, R, S], giving [B, heads, R, S + 1]."""
    column = b.Concat(b.size(mask, 0), b.i64(heads), b.size(mask, 2), b.i64(1), axis=0)
    spread = b.Expand(mask, b.i64(1, heads, 1, 1))
    return b.Concat(spread, b.Expand(b.reshape(sinks, 1, heads, 1, 1), column), axis=3)


def _with_zero_key(b: BodyBuilder, x: ir.Value) -> ir.Value:
    """Append a key or value of zeros to ``x`` [B, kv_heads, S, width]."""
    zero = b.slice(x, 0, 1, 2)
    return b.Concat(x, b.Sub(zero, zero), axis=2)


def _flat_rows(b: BodyBuilder, x: ir.Value, rows: Rows) -> ir.Value:
    """Return ``x`` [B, R, …] in the layout of the launch, [T, …]."""
    if rows.place is None:
        return b.Squeeze(x, b.i64(0))
    return b.GatherND(x, b.Transpose(rows.place, perm=[1, 0]))
