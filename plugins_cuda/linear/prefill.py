"""Linear in prefill: x as panels, then the tensor-core GEMM."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Tactic
from specbuild.plugins_cuda.prefill_gemm import (
    ROWS_STAGING,
    dense_gemm,
    dense_launches,
    dense_tactics,
)


def lower_prefill(request: LoweringRequest) -> Lowering:
    """Return the launches for ``x`` [T, K], packed ``weight``, ``bias``?, ``residual``? → ``y`` [T,
    N].

    Raises SpecbuildError if the weight is packed for another K, or the tactic is unknown.
    """
    gemm = dense_gemm(request, "weight", ROWS_STAGING)
    constants = (
        ("HAS_BIAS", int("bias" in request.tensors)),
        ("HAS_RESIDUAL", int("residual" in request.tensors)),
        ("SCALE", float(request.attributes["scale"])),
    )
    return dense_launches(
        request,
        gemm,
        "linear",
        constants=constants,
        rows=("x",),
        product=("weight", "bias", "residual", "y"),
    )


def prefill_tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return the tokens of a tile, and whether wgmma computes it."""
    return dense_tactics(request, "weight")
