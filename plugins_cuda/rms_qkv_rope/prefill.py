"""RmsQkvRope over a prompt chunk: normed x as panels, then the tensor-core GEMM."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
    Workspace,
)
from specbuild.plugins_cuda.prefill_gemm import (
    ROWS_PER_BLOCK,
    ROWS_STAGING,
    ROWS_THREADS,
    THREADS,
    ceil_div,
    dense_gemm,
    dense_tactics,
)


def lower_prefill(request: LoweringRequest) -> Lowering:
    """``x`` [T, K] → rotated ``q`` [T, Hq, D], K and V into their slots of the pools.

    SpecbuildError where the weight is packed for another K, or the tactic is unknown.
    """
    gemm = dense_gemm(request, "weight", ROWS_STAGING)
    _, kv_heads, page_size, head_dim = request.tensors["k_pool"].shape
    constants = (
        *gemm.constants,
        ("HAS_NORM", int("norm" in request.tensors)),
        ("HAS_BIAS", int("bias" in request.tensors)),
        ("EPS", float(request.attributes["eps"])),
        ("HEAD_DIM", head_dim),
        ("Q_HEADS", int(request.attributes["q_heads"])),
        ("KV_HEADS", kv_heads),
        ("PAGE_SIZE", page_size),
    )

    def kernel(entry: str) -> Kernel:
        return Kernel("rms_qkv_rope", entry, constants, file="prefill.cu")

    panels = OpLaunch(
        kernel("rms_qkv_rope_rows"),
        grid=(ceil_div(gemm.rows, ROWS_PER_BLOCK), 1, 1),
        block=ROWS_THREADS,
        shared_bytes=0,
        arguments=("x", "norm", "workspace_panels", gemm.rows, gemm.panel_rows),
    )
    product = OpLaunch(
        kernel("rms_qkv_rope_gemm"),
        grid=(min(gemm.tiles, request.target.multiprocessors), 1, 1),
        block=THREADS,
        shared_bytes=gemm.shared_bytes,
        arguments=(
            *("weight", "bias", "cos", "sin", "positions", "write_slot", "k_pool", "v_pool", "q"),
            *("workspace_panels", gemm.rows),
        ),
    )
    return Lowering((panels, product), (Workspace("workspace_panels", gemm.workspace_bytes),))


def prefill_tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Tokens of a tile, and whether wgmma computes it."""
    return dense_tactics(request, "weight")
