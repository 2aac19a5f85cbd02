"""RmsQkvRope over a prompt chunk: normed x as panels, then the tensor-core GEMM."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Tactic
from specbuild.plugins_cuda.prefill_gemm import (
    ROWS_STAGING,
    dense_gemm,
    dense_launches,
    dense_tactics,
)


def lower_prefill(request: LoweringRequest) -> Lowering:
    """``x`` [T, K] → rotated ``q`` [T, Hq, D], K and V into their slots of the pools.

    SpecbuildError where the weight is packed for another K, or the tactic is unknown.
    """
    gemm = dense_gemm(request, "weight", ROWS_STAGING)
    _, kv_heads, page_size, head_dim = request.tensors["k_pool"].shape
    constants = (
        ("HAS_NORM", int("norm" in request.tensors)),
        ("HAS_BIAS", int("bias" in request.tensors)),
        ("EPS", float(request.attributes["eps"])),
        ("HEAD_DIM", head_dim),
        ("Q_HEADS", int(request.attributes["q_heads"])),
        ("KV_HEADS", kv_heads),
        ("PAGE_SIZE", page_size),
    )
    return dense_launches(
        request,
        gemm,
        "rms_qkv_rope",
        constants=constants,
        rows=("x", "norm"),
        product=(
            "weight",
            "bias",
            "cos",
            "sin",
            "positions",
            "write_slot",
            "k_pool",
            "v_pool",
            "q",
        ),
    )


def prefill_tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Tokens of a tile, and whether wgmma computes it."""
    return dense_tactics(request, "weight")
