"""KvBlockSummary on a GPU: a warp per block and KV head; most are idle in most steps."""

from __future__ import annotations

from specbuild.plugins_cuda.kv_write.lowering import cache_vector_bytes
from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.runtime.errors import SpecbuildError

THREADS = 256
_LANES = 32
_CHANNELS_OF_A_LANE = (2, 4)


def lower(request: LoweringRequest) -> Lowering:
    """Return one launch; SpecbuildError if a key's channels do not divide evenly over a warp."""
    pool = request.tensors["k_pool"]
    cache_vector_bytes("KvBlockSummary", "k_pool", pool)
    _, kv_heads, page_size, width = pool.shape
    if width > _LANES * max(_CHANNELS_OF_A_LANE) or width % 2:
        raise SpecbuildError(
            f"KvBlockSummary: got keys of width {width}, expected even widths up to "
            f"{_LANES * max(_CHANNELS_OF_A_LANE)}; build for the cpu backend"
        )
    batch, table = request.tensors["logical_pages"].shape
    constants = (
        ("KV_HEADS", kv_heads),
        ("PAGE_SIZE", page_size),
        ("WIDTH", width),
        ("THREADS", THREADS),
    )
    pages = (int(request.attributes[name]) for name in ("sink_pages", "block_pages"))
    launch = OpLaunch(
        Kernel("kv_block_summary", "summarise_blocks", constants),
        grid=(2 * request.target.multiprocessors, 1, 1),
        block=THREADS,
        shared_bytes=0,
        arguments=(
            "summary_pool",
            "k_pool",
            "logical_pages",
            "first_block",
            "blocks",
            batch,
            table,
            *pages,
        ),
    )
    return Lowering((launch,))
