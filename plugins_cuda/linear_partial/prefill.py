"""LinearPartial over a prompt chunk: x as panels, then the tensor-core GEMM."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Tactic
from specbuild.plugins_cuda.prefill_gemm import (
    UNSTAGED,
    dense_gemm,
    dense_launches,
    dense_tactics,
)


def lower_prefill(request: LoweringRequest) -> Lowering:
    """``x`` [T, K], packed ``weight`` → ``partial`` [T, N].

    SpecbuildError where the weight is packed for another K, or the tactic is unknown.
    """
    gemm = dense_gemm(request, "weight", UNSTAGED)
    return dense_launches(
        request,
        gemm,
        "linear_partial",
        constants=(),
        rows=("x",),
        product=("weight", "partial"),
    )


def prefill_tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Tokens of a tile, and whether wgmma computes it."""
    return dense_tactics(request, "weight")
