"""The default sizes of engines with CUDA kernels."""

from __future__ import annotations

from specbuild.builder.engine.backend_sizes import (
    GUIDE_CHAIN,
    MAX_DECODE_ROWS,
    SHORT_CHAIN,
    BackendSizes,
)
from specbuild.plugins_cuda.kv_write.op import POOL_AXES
from specbuild.runtime.cache.layout import KV_DTYPE

SIZES = BackendSizes(
    page_size=64,
    draft_limits=SHORT_CHAIN,
    prefill_rows=2048,
    cache_dtype=KV_DTYPE,
    pool_axes=POOL_AXES,
    draft_dtype="bf16",
    decode_rows=MAX_DECODE_ROWS,
    guide_chain=GUIDE_CHAIN,
    one_form=True,
)
