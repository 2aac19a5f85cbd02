"""KvWrite as ScatterND on (head, page, offset): in place if input and output are one buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder, static_size
from specbuild.plugins_cuda.kv_write.codes import encoded, holds_codes


def slot_indices(b: BodyBuilder, slot: ir.Value, heads: int, page_size: int) -> ir.Value:
    """Convert ``slot`` [..., n] int64 to ScatterND and GatherND indices [heads, n, 3]."""
    size = b.scalar(page_size, dtype=np.int64)
    place = b.Concat(
        b.reshape(b.Div(slot, size), -1, 1), b.reshape(b.Mod(slot, size), -1, 1), axis=1
    )
    shape = b.Concat(b.i64(heads), b.Shape(place), axis=0)
    head = b.constant([[[h]] for h in range(heads)], np.int64)
    one_column = b.Concat(b.i64(heads), b.size(place, 0), b.i64(1), axis=0)
    return b.Concat(b.Expand(head, one_column), b.Expand(place, shape), axis=2)


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], _attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """Return the body's outputs; the pool's axes are (kv_heads, pages, page_size, width)."""
    pool, new, write_slot = inputs
    assert pool is not None and new is not None and write_slot is not None
    if holds_codes(pool):
        new = encoded(b, new)
    slot = b.cast(write_slot, ir.DataType.INT64)
    indices = slot_indices(b, slot, static_size(pool, 0), static_size(pool, 2))
    return [b.ScatterND(pool, indices, b.Transpose(new, perm=[1, 0, 2]))]
