"""The default sizes of engines with CUDA kernels, and their padding of latent caches.

Rows of latent pools are padded to a multiple of an mma's K.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from specbuild.builder.engine.backend_sizes import (
    GUIDE_CHAIN,
    MAX_DECODE_ROWS,
    SHORT_CHAIN,
    BackendSizes,
)
from specbuild.builder.engine.sizes import EngineSizes
from specbuild.plugins_cuda.kv_write.op import POOL_AXES
from specbuild.runtime.cache.layout import KV_DTYPE, padded_width
from specbuild.runtime.engine_dir.manifest import CacheGroup

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


def with_padded_latents(engine_sizes: EngineSizes) -> EngineSizes:
    """Return the sizes with latent pools that have space for the zeros after each latent."""
    return replace(engine_sizes, groups=tuple(_padded(group) for group in engine_sizes.groups))


def widen_pools(model: ir.Model, engine_sizes: EngineSizes) -> None:
    """Widen the latent pools of a portable graph to the padded widths of the engine."""
    widths = {
        f"{group.name}.{layer}.{part}_pool": width
        for group in engine_sizes.groups
        if group.latent_widths
        for layer in group.layers
        for part, width in group.pool_widths(layer).items()
    }
    for value in (*model.graph.inputs, *model.graph.outputs):
        width = widths.get(str(value.name).removesuffix(".out"))
        if width is not None:
            assert value.shape is not None
            value.shape = ir.Shape([*list(value.shape)[:-1], width])


def _padded(group: CacheGroup) -> CacheGroup:
    if not group.latent_widths:
        return group
    widths = tuple(padded_width(width) for width in group.latent_widths)
    return replace(group, k_width=max(widths), v_width=max(widths), latent_widths=widths)
