"""The launch that normalizes and rotates the heads of queries and keys with norms."""

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

# The values of a head per lane, and the maximum of lanes per head (device/normed_heads.cuh).
_LANE_VALUES, _MAX_LANES = 16, 32
# Threads of a CTA that normalizes all heads of a row together.
_MAX_THREADS = 1024
_CODED_THREADS = 128
# The workspace of projected keys: a quantized pool cannot hold them before their norm.
_KEYS = "workspace_keys"


def holds_codes(request: LoweringRequest) -> bool:
    """Return whether the pools hold e4m3 (kv_write/codes.py)."""
    return request.tensors["k_pool"].dtype == "uint8"


def projected_keys(request: LoweringRequest) -> str:
    """Return where the projection stores keys: the pool, or a workspace if normed keys are
    quantized.
    """
    return _KEYS if "k_norm" in request.tensors and holds_codes(request) else "k_pool"


def norms_heads(request: LoweringRequest) -> bool:
    """Return whether queries or keys are normed after their projection."""
    return any(name in request.tensors for name in ("q_norm", "k_norm"))


def head_sizes(request: LoweringRequest) -> tuple[tuple[str, int], ...]:
    """Return heads, their width and the pools' pages: constants of all kernels of the op."""
    _, _, page_size, width = request.tensors["k_pool"].shape
    return (
        ("Q_HEADS", int(request.attributes["q_heads"])),
        ("KV_HEADS", int(request.attributes["kv_heads"])),
        ("HEAD_DIM", width),
        ("PAGE_SIZE", page_size),
        ("CODES", int(holds_codes(request))),
        ("WHOLE_NORMS", int(norms_all_heads(request))),
        ("VALUE_NORM", int(request.attributes["value_norm"])),
        ("GROWTH", int(request.attributes["growth"])),
    )


def norms_all_heads(request: LoweringRequest) -> bool:
    """Return whether a norm covers all heads of a row."""
    width = request.tensors["k_pool"].shape[3]
    norms = (request.tensors.get(name) for name in ("q_norm", "k_norm"))
    return any(norm is not None and norm.shape[0] != width for norm in norms)


def heads_threads(request: LoweringRequest, default: int) -> int:
    """Return the threads of a CTA:

    ``default``, or those for all heads of a row that share a norm.
    """
    if not norms_all_heads(request):
        return default
    heads, kv_heads, width = (size for _, size in head_sizes(request)[:3])
    threads = -(-max(heads, kv_heads) * _lanes(width) // 32) * 32
    if threads > _MAX_THREADS:
        raise SpecbuildError(
            f"RmsQkvRope: one norm over {max(heads, kv_heads)} heads of {width} values; its kernel "
            f"takes up to {_MAX_THREADS * _LANE_VALUES} values; build for the cpu backend"
        )
    return threads


def _lanes(width: int) -> int:
    """Return the number of lanes that share a head of this width."""
    lanes = 1
    while lanes * _LANE_VALUES < width:
        lanes *= 2
    return lanes


def with_heads(
    request: LoweringRequest, lowering: Lowering, kernel: Kernel, threads: int
) -> Lowering:
    """Return the launches, followed by one of ``kernel`` with ``threads`` if heads have norms.

    Quantized pools need a separate kernel. Raises SpecbuildError for heads that are too wide.
    """
    values = bool(request.attributes["value_norm"])
    if not norms_heads(request) and not values:
        return lowering
    if values and (
        "k_norm" not in request.tensors or holds_codes(request) or norms_all_heads(request)
    ):
        raise SpecbuildError(
            "RmsQkvRope: norms of values need a norm per head of keys and pools of bf16; build for "
            "the cpu backend"
        )
    arguments: tuple[Argument, ...] = ()
    workspaces = lowering.workspaces
    if holds_codes(request) and "k_norm" in request.tensors:
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
            f"RmsQkvRope: norms of heads of {width} values; its kernel takes up to "
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
