"""PagedTreeAttention of prompt chunks on a GPU: a CTA per 16 or 8 rows and KV head."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.plugins_cuda.paged_tree_attention.geometry import ARGUMENTS, Geometry, geometry_of
from specbuild.plugins_cuda.paged_tree_attention.selected import require_lists

KEYS = 64
MOST_ROWS, ROWS_OF_WIDE_HEADS = 16, 8
THREADS = 128


def lower_prefill(request: LoweringRequest) -> Lowering:
    """One launch for any number of rows."""
    shape = geometry_of(request)
    if "selected" in request.tensors:
        require_lists(request, shape)
    return Lowering((attend_prompt(shape, ARGUMENTS),))


def attend_prompt(shape: Geometry, arguments: tuple[str, ...]) -> OpLaunch:
    """The launch; ``arguments`` are those of the op, or what stands in their place."""
    rows = MOST_ROWS if shape.width <= 64 else ROWS_OF_WIDE_HEADS
    return OpLaunch(
        Kernel(
            "paged_tree_attention",
            "attend_prompt",
            (*shape.constants(), ("BATCH", shape.batch)),
            file="prefill.cu",
        ),
        # Sequences end in a tile of their own: at most one more than whole tiles for each.
        grid=(shape.rows // rows + shape.batch, shape.kv_heads, 1),
        block=THREADS,
        shared_bytes=2 * 2 * KEYS * shape.width * 2,
        arguments=arguments,
    )
