"""PathCommit on a GPU: one CTA per sequence and layer's K or V, staged through shared memory."""

from __future__ import annotations

from specbuild.plugins_cuda.kv_write.lowering import cache_vector_bytes
from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.runtime.errors import SpecbuildError

THREADS = 256


def lower(request: LoweringRequest) -> Lowering:
    """Return one launch; SpecbuildError if a path's entries do not fit in shared memory."""
    pools = request.tensors["pools"]
    parts, pages, kv_heads, page_size, _ = pools.shape
    batch, depth = request.tensors["path"].shape
    head_bytes = cache_vector_bytes("PathCommit", "pools", pools, dtypes=("bfloat16", "uint8"))
    staged = depth * kv_heads * head_bytes
    if staged > request.target.shared_bytes_per_block:
        raise SpecbuildError(
            f"PathCommit: a path of {depth} entries of {kv_heads} heads of {head_bytes} bytes "
            f"needs {staged} bytes of shared memory, of which a CTA has "
            f"{request.target.shared_bytes_per_block}: use a shallower draft."
        )
    constants = (
        ("PAGES", pages),
        ("KV_HEADS", kv_heads),
        ("PAGE_SIZE", page_size),
        ("HEAD_BYTES", head_bytes),
        ("DEPTH", depth),
        ("TABLE", request.tensors["page_table"].shape[1]),
        ("THREADS", THREADS),
        ("SHARED_BYTES", staged),
    )
    launch = OpLaunch(
        Kernel("path_commit", "commit_paths", constants),
        grid=(parts, batch, 1),
        block=THREADS,
        shared_bytes=staged,
        arguments=("pools", "path", "length", "page_table"),
    )
    return Lowering((launch,))
