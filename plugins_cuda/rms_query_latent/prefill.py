"""RmsQueryLatent in prefill: rms(x) as panels, then the tensor-core GEMM."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Tactic
from specbuild.plugins_cuda.prefill_gemm import (
    ROWS_STAGING,
    dense_gemm,
    dense_launches,
    dense_tactics,
)


def lower_prefill(request: LoweringRequest) -> Lowering:
    """Return the launches for ``x`` [T, K] → rotated ``q`` [T, Hq, D] and the cached latents.

    Raises SpecbuildError if the weight is packed for another K, or the tactic is unknown.
    """
    gemm = dense_gemm(request, "weight", ROWS_STAGING)
    constants = (
        ("HAS_NORM", int("norm" in request.tensors)),
        ("HAS_BIAS", int("bias" in request.tensors)),
        ("EPS", float(request.attributes["eps"])),
        ("HEAD_DIM", request.tensors["q"].shape[2]),
        ("Q_HEADS", int(request.attributes["q_heads"])),
        ("LATENT", request.tensors["c_pool"].shape[3]),
    )
    return dense_launches(
        request,
        gemm,
        "rms_query_latent",
        constants=constants,
        rows=("x", "norm"),
        product=(
            "weight",
            "bias",
            "cos",
            "sin",
            "positions",
            "write_slot",
            "c_pool",
            "q",
        ),
    )


def prefill_tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return the tokens of a tile, and whether wgmma computes it."""
    return dense_tactics(request, "weight")
