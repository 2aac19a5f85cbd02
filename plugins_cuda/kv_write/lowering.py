"""KvWrite on a GPU: 16 bytes per thread."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    TensorInfo,
)
from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.errors import SpecbuildError

THREADS = 256
VECTOR_BYTES = 16


def cache_vector_bytes(
    op: str, name: str, pool: TensorInfo, *, dtypes: tuple[str, ...] = ("bfloat16",)
) -> int:
    """Return the bytes of one head of a slot.

    Raises SpecbuildError for other dtypes, and for heads that are no multiple of 16 bytes.
    """
    width = pool.shape[-1]
    if pool.dtype not in dtypes or width * ITEM_BYTES[pool.dtype] % VECTOR_BYTES:
        raise SpecbuildError(
            f"{op}: {name} has heads of {width} {pool.dtype} values, expected "
            f"{' or '.join(dtypes)} in multiples of {VECTOR_BYTES} bytes; choose another backend "
            "for this model"
        )
    return width * ITEM_BYTES[pool.dtype]


def lower(request: LoweringRequest) -> Lowering:
    """Return one launch, with a thread per 16 bytes of the new rows."""
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
