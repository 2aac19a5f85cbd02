"""The sizes of CPU engines where nothing is asked for."""

from __future__ import annotations

from specbuild.builder.engine.backend_sizes import DEFAULT_TREE_LIMITS, BackendSizes
from specbuild.plugins_cuda.kv_write.op import POOL_BODY_AXES

SIZES = BackendSizes(
    page_size=16,
    draft_limits=DEFAULT_TREE_LIMITS,
    prefill_rows=256,
    cache_dtype="float32",
    pool_axes=POOL_BODY_AXES,
    draft_dtype="fp32",
)
