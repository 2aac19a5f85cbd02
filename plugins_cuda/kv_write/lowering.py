"""KvWrite on a GPU: 16 bytes a thread."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch, TensorInfo
from specbuild.runtime.errors import SpecbuildError

THREADS = 256
VECTOR_BYTES = 16


def cache_vector_bytes(op: str, name: str, pool: TensorInfo) -> int:
    """Bytes of one head of a slot; SpecbuildError unless it is bf16 in whole 16-byte vectors."""
    width = pool.shape[-1]
    if pool.dtype != "bfloat16" or width * 2 % VECTOR_BYTES:
        raise SpecbuildError(
            f"{op}: {name} has heads of {width} {pool.dtype} values, its kernel takes bfloat16 in "
            "multiples of 8: choose another target for this model."
        )
    return width * 2


def lower(request: LoweringRequest) -> Lowering:
    """One launch, a thread per 16 bytes of the new rows."""
    pool = request.tensors["pool"]
    vectors = cache_vector_bytes("KvWrite", "pool", pool) // VECTOR_BYTES
    _, kv_heads, page_size, width = pool.shape
    rows = request.tensors["new"].shape[0]
    constants = (
        ("KV_HEADS", kv_heads),
        ("PAGE_SIZE", page_size),
        ("WIDTH", width),
        ("ROWS", rows),
        ("THREADS", THREADS),
    )
    launch = OpLaunch(
        Kernel("kv_write", "write_rows", constants),
        grid=(-(-rows * kv_heads * vectors // THREADS), 1, 1),
        block=THREADS,
        shared_bytes=0,
        arguments=("pool", "new", "write_slot"),
    )
    return Lowering((launch,))
