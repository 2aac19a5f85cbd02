"""PagedTreeAttention of prompt chunks on a GPU: a CTA per 16 or 8 rows and KV head.

Rows that see everything before them, with heads 64 wide, have a kernel of their own.
"""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    require,
)
from specbuild.plugins_cuda.paged_tree_attention.geometry import ARGUMENTS, Geometry, geometry_of
from specbuild.plugins_cuda.paged_tree_attention.selected import refusal

KEYS, KEYS_OF_FULL_ROWS = 64, 128
MOST_ROWS, ROWS_OF_WIDE_HEADS = 16, 8
THREADS, THREADS_OF_FULL_ROWS = 128, 384
FULL_WIDTH = 64
STAGES = 4


def lower_prefill(request: LoweringRequest) -> Lowering:
    """One launch for any number of rows."""
    shape = geometry_of(request)
    require(refusal(request))
    return Lowering((attend_prompt(shape, ARGUMENTS),))


def attend_prompt(shape: Geometry, arguments: tuple[str, ...]) -> OpLaunch:
    """The launch; ``arguments`` are those of the op, or what stands in their place."""
    full = shape.width == FULL_WIDTH and shape.window == 0
    rows = MOST_ROWS if shape.width <= 64 else ROWS_OF_WIDE_HEADS
    keys, stages = (KEYS_OF_FULL_ROWS, STAGES) if full else (KEYS, 2)
    constants = (*shape.constants(), ("BATCH", shape.batch))
    return OpLaunch(
        Kernel(
            "paged_tree_attention",
            "attend_full_prompt" if full else "attend_prompt",
            (*constants, ("STAGES", stages)) if full else constants,
            file="prefill_full.cu" if full else "prefill.cu",
        ),
        # Sequences end in a tile of their own: at most one more than whole tiles for each.
        grid=(shape.rows // rows + shape.batch, shape.kv_heads, 1),
        block=THREADS_OF_FULL_ROWS if full else THREADS,
        shared_bytes=stages * 2 * keys * shape.width * 2,
        arguments=arguments,
    )
