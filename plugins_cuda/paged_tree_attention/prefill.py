"""PagedTreeAttention in prefill: a CTA per 8, 16 or 32 rows and KV head.

Rows without a window and with heads of 64, 128 or 256 have a separate kernel.
"""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    require,
)
from specbuild.plugins_cuda.paged_tree_attention.geometry import (
    ARGUMENTS,
    WIDE,
    WIDEST_OF_MANY,
    Geometry,
    geometry_of,
    tile_row_bytes,
)
from specbuild.plugins_cuda.paged_tree_attention.selected import refusal

WARPS, KEYS = 4, 64
# Of the widest heads that these kernels take, and of codes: registers hold fewer scores.
FEW_KEYS, WARPS_OF_WIDEST, WIDEST = 32, 8, 256
WARPS_OF_FULL_ROWS, GROUPS_OF_FULL_ROWS, COPYING_WARPS, STAGES = 8, 2, 4, 4
FULL_KEYS_TIMES_WIDTH = 8192  # 32 KB a stage


def lower_prefill(request: LoweringRequest) -> Lowering:
    """Return one launch for any number of rows."""
    shape = geometry_of(request)
    require(refusal(request))
    return Lowering((attend_prompt(shape, ARGUMENTS),))


def attend_prompt(shape: Geometry, arguments: tuple[str, ...]) -> OpLaunch:
    """Return the launch; ``arguments`` are those of the op, or their replacements."""
    full = has_full_rows(shape)
    constants = (*shape.constants(), ("BATCH", shape.batch))
    if full:
        keys, stages, rows = FULL_KEYS_TIMES_WIDTH // shape.width, STAGES, WARPS_OF_FULL_ROWS
        warps = WARPS_OF_FULL_ROWS + COPYING_WARPS
        constants += (("KEYS", keys), ("STAGES", stages))
        queries = GROUPS_OF_FULL_ROWS * 64 if shape.width > WIDEST_OF_MANY else 0
    else:
        is_widest = shape.width > WIDEST_OF_MANY
        keys, stages = FEW_KEYS if shape.codes or is_widest else KEYS, 2
        warps = WARPS_OF_WIDEST if is_widest else WARPS
        rows = warps * (2 if shape.width <= WIDE else 1)
        queries = warps * 16 if is_widest else 0
    shared_bytes = stages * 2 * keys * tile_row_bytes(shape.head_bytes)
    shared_bytes += queries * shape.head_bytes  # rows of the mma of warps or warpgroups
    constants += (("SHARED_BYTES", shared_bytes),)
    return OpLaunch(
        Kernel(
            "paged_tree_attention",
            "attend_full_prompt" if full else "attend_prompt",
            constants,
            file="prefill_full.cu" if full else "prefill.cu",
        ),
        # Sequences end with a separate tile: at most one incomplete tile each.
        grid=(shape.rows // (rows * shape.mma_rows) + shape.batch, shape.kv_heads, 1),
        block=32 * warps,
        shared_bytes=shared_bytes,
        arguments=arguments,
    )


def has_full_rows(shape: Geometry) -> bool:
    """Return whether the wgmma kernel supports it."""
    takes_wgmma = shape.takes_wgmma or (shape.width == WIDEST and not shape.codes)
    return takes_wgmma and shape.window == 0
