"""KvCommit on a GPU: one CTA per KV head, staged through shared memory."""

from __future__ import annotations

from specbuild.plugins_cuda.kv_write.lowering import cache_vector_bytes
from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.runtime.errors import SpecbuildError

THREADS = 256


def lower(request: LoweringRequest) -> Lowering:
    """Return one launch; SpecbuildError if the entries of all pairs do not fit in shared memory."""
    pool = request.tensors["pool"]
    _, kv_heads, page_size, width = pool.shape
    batch, depth = request.tensors["from_slot"].shape
    staged = batch * depth * cache_vector_bytes("KvCommit", "pool", pool)
    if staged > request.target.shared_bytes_per_block:
        raise SpecbuildError(
            f"KvCommit: {batch} sequences of {depth} entries of width {width} need {staged} bytes "
            f"of shared memory, a CTA has {request.target.shared_bytes_per_block}; use a smaller "
            "batch or a shallower draft"
        )
    constants = (
        ("KV_HEADS", kv_heads),
        ("PAGE_SIZE", page_size),
        ("WIDTH", width),
        ("PAIRS", batch * depth),
        ("THREADS", THREADS),
        ("SHARED_BYTES", staged),
    )
    launch = OpLaunch(
        Kernel("kv_commit", "commit_pairs", constants),
        grid=(kv_heads, 1, 1),
        block=THREADS,
        shared_bytes=staged,
        arguments=("pool", "from_slot", "to_slot"),
    )
    return Lowering((launch,))
