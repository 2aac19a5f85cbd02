"""The launch that norms and rotates the heads of queries and keys, where they have norms."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, LoweringRequest, OpLaunch
from specbuild.runtime.errors import SpecbuildError

# Values of a head that a lane has, and how many lanes may share one (device/normed_heads.cuh).
_LANE_VALUES, _MOST_LANES = 16, 16


def head_sizes(request: LoweringRequest) -> tuple[tuple[str, int], ...]:
    """Heads, their width and the pools' pages, as all kernels of the op are compiled with."""
    _, kv_heads, page_size, width = request.tensors["k_pool"].shape
    return (
        ("Q_HEADS", int(request.attributes["q_heads"])),
        ("KV_HEADS", kv_heads),
        ("HEAD_DIM", width),
        ("PAGE_SIZE", page_size),
    )


def heads_launch(request: LoweringRequest, kernel: Kernel, threads: int) -> OpLaunch:
    """The launch of a ``kernel`` of so many threads; SpecbuildError for heads that are too wide."""
    rows = request.tensors["x"].shape[0]
    heads, kv_heads, width = (size for _, size in head_sizes(request)[:3])
    lanes = 1
    while lanes * _LANE_VALUES < width:
        lanes *= 2
    if lanes > _MOST_LANES:
        raise SpecbuildError(
            f"RmsQkvRope: normed heads of {width} values, its kernel takes up to "
            f"{_MOST_LANES * _LANE_VALUES}; build for the cpu backend"
        )
    return OpLaunch(
        kernel,
        grid=(-(-rows * (heads + kv_heads) * lanes // threads), 1, 1),
        block=threads,
        shared_bytes=0,
        arguments=(
            *("q_norm", "k_norm", "cos", "sin", "positions", "write_slot", "k_pool", "q"),
            rows,
        ),
        triggers_late=True,
    )
