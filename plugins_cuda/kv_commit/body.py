"""KvCommit as GatherND and ScatterND; a pair without effect copies page 0 to itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder, static_size
from specbuild.plugins_cuda.kv_write.body import slot_indices


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], _attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """Return the body's outputs; the pool's axes are (kv_heads, pages, page_size, width)."""
    pool, from_slot, to_slot = inputs
    assert pool is not None and from_slot is not None and to_slot is not None
    zero = b.scalar(0, dtype=np.int64)
    source = b.cast(from_slot, ir.DataType.INT64)
    target = b.cast(to_slot, ir.DataType.INT64)
    moved = b.And(b.GreaterOrEqual(b.Min(source, target), zero), b.Not(b.Equal(source, target)))
    heads, page_size = static_size(pool, 0), static_size(pool, 2)
    flat = b.i64(-1)
    read = slot_indices(b, b.Reshape(b.Where(moved, source, zero), flat), heads, page_size)
    write = slot_indices(b, b.Reshape(b.Where(moved, target, zero), flat), heads, page_size)
    return [b.ScatterND(pool, write, b.GatherND(pool, read))]
