"""The launch that norms and rotates the heads of queries and keys, where they have norms."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Argument,
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Workspace,
)
from specbuild.plugins_cuda.rms_norms import rounding_code
from specbuild.runtime.errors import SpecbuildError

# Values of a head that a lane has, and how many lanes may share one (device/normed_heads.cuh).
_LANE_VALUES, _MAX_LANES = 16, 32
# Of a CTA that norms all heads of a row together.
_MAX_THREADS = 1024
_CODED_THREADS = 128
# Of projected keys, where a pool of codes has no place for what is yet to be normed.
_KEYS = "workspace_keys"


def holds_codes(request: LoweringRequest) -> bool:
    """Whether the pools hold e4m3 (kv_write/codes.py)."""
    return request.tensors["k_pool"].dtype == "uint8"


def projected_keys(request: LoweringRequest) -> str:
    """Where the projection leaves keys: in the pool, unless norms of heads await codes."""
    normed = "k_norm" in request.tensors
    return _KEYS if normed and holds_codes(request) else "k_pool"


def head_sizes(request: LoweringRequest) -> tuple[tuple[str, int], ...]:
    """Heads, their width and the pools' pages, as all kernels of the op are compiled with."""
    _, kv_heads, page_size, width = request.tensors["k_pool"].shape
    return (
        ("Q_HEADS", int(request.attributes["q_heads"])),
        ("KV_HEADS", kv_heads),
        ("HEAD_DIM", width),
        ("PAGE_SIZE", page_size),
        ("CODES", int(holds_codes(request))),
        ("WHOLE_NORMS", int(norms_all_heads(request))),
        ("VALUE_NORM", int(request.attributes["value_norm"])),
        ("GROWTH", int(request.attributes["growth"])),
    )


def norms_all_heads(request: LoweringRequest) -> bool:
    """Whether a norm is one over all heads of a row."""
    width = request.tensors["k_pool"].shape[3]
    norms = (request.tensors.get(name) for name in ("q_norm", "k_norm"))
    return any(norm is not None and norm.shape[0] != width for norm in norms)


def heads_threads(request: LoweringRequest, usual: int) -> int:
    """Threads of a CTA that norms heads: all of a row's where they are normed together."""
    if not norms_all_heads(request):
        return usual
    heads, kv_heads, width = (size for _, size in head_sizes(request)[:3])
    threads = -(-max(heads, kv_heads) * _lanes(width) // 32) * 32
    if threads > _MAX_THREADS:
        raise SpecbuildError(
            f"RmsQkvRope: {max(heads, kv_heads)} heads of {width} values normed together, its "
            f"kernel takes up to {_MAX_THREADS * _LANE_VALUES} values; build for the cpu backend"
        )
    return threads


def _lanes(width: int) -> int:
    """Lanes that share a head of so many values."""
    lanes = 1
    while lanes * _LANE_VALUES < width:
        lanes *= 2
    return lanes


def with_heads(
    request: LoweringRequest, lowering: Lowering, kernel: Kernel, threads: int
) -> Lowering:
    """The launches, and one behind them where heads are normed: of ``kernel``, of so many threads.

    Pools of codes have a kernel of their own. SpecbuildError for heads that are too wide.
    """
    values = bool(request.attributes["value_norm"])
    if "k_norm" not in request.tensors and not values:
        return lowering
    if values and (
        "k_norm" not in request.tensors or holds_codes(request) or norms_all_heads(request)
    ):
        raise SpecbuildError(
            "RmsQkvRope: values are normed beside keys that are normed head by head, in pools of "
            "bf16; build for the cpu backend"
        )
    arguments: tuple[Argument, ...] = ()
    workspaces = lowering.workspaces
    if holds_codes(request):
        threads = heads_threads(request, _CODED_THREADS)
        constants = (
            *head_sizes(request),
            ("THREADS", threads),
            ("HEAD_ROUNDING", rounding_code(str(request.attributes["head_rounding"]))),
            ("EPS", float(request.attributes["eps"])),
        )
        kernel = Kernel(
            "rms_qkv_rope", "rms_qkv_rope_coded_heads", constants, file="coded_heads.cu"
        )
        arguments = (_KEYS,)
        rows, keys = request.tensors["x"].shape[0], request.tensors["k_pool"].shape
        workspaces = (*workspaces, Workspace(_KEYS, 2 * rows * keys[1] * keys[3]))
    heads = _heads_launch(request, kernel, threads, arguments)
    return Lowering((*lowering.launches, heads), workspaces)


def _heads_launch(
    request: LoweringRequest, kernel: Kernel, threads: int, further: tuple[Argument, ...]
) -> OpLaunch:
    rows = request.tensors["x"].shape[0]
    heads, kv_heads, width = (size for _, size in head_sizes(request)[:3])
    lanes = _lanes(width)
    if lanes > _MAX_LANES:
        raise SpecbuildError(
            f"RmsQkvRope: normed heads of {width} values, its kernel takes up to "
            f"{_MAX_LANES * _LANE_VALUES}; build for the cpu backend"
        )
    turned = heads + kv_heads * (1 + int(request.attributes["value_norm"]))
    parts = -(-rows * turned * lanes // threads)
    return OpLaunch(
        kernel,
        grid=(rows, 1 + int(heads > 0), 1) if norms_all_heads(request) else (parts, 1, 1),
        block=threads,
        shared_bytes=0,
        arguments=(
            *("q_norm", "k_norm", "cos", "sin", "positions", "write_slot", "k_pool", "v_pool"),
            "q",
            *further,
            rows,
        ),
        triggers_late=True,
    )
