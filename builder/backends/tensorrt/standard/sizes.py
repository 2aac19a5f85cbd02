"""The sizes of engines of standard ops, where nothing is asked for."""

from __future__ import annotations

from specbuild.builder.engine.backend_sizes import SHORT_CHAIN, BackendSizes
from specbuild.plugins_cuda.kv_write.op import POOL_BODY_AXES
from specbuild.runtime.cache.layout import KV_DTYPE

SIZES = BackendSizes(
    page_size=64,
    draft_limits=SHORT_CHAIN,
    # Attention's mask has an entry for every head, row and key: shorter chunks.
    prefill_rows=256,
    cache_dtype=KV_DTYPE,
    pool_axes=POOL_BODY_AXES,
    draft_dtype="bf16",
)
