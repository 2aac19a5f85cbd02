"""RmsSwiglu in prefill: rms(x) as panels, then the tensor-core GEMM."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Tactic
from specbuild.plugins_cuda.prefill_gemm import (
    PAIRS_STAGING,
    dense_gemm,
    dense_launches,
    dense_tactics,
)
from specbuild.plugins_cuda.rms_norms import rounding_code, rounding_of
from specbuild.runtime.errors import SpecbuildError

# In the order of their numbers in kernels (device/activated.cuh).
SWIGLU, GEGLU = "swiglu", "geglu_tanh"
_ACTIVATIONS = (SWIGLU, GEGLU)


def epilogue(request: LoweringRequest) -> tuple[tuple[str, int], ...]:
    """Return the constants of the epilogue.

    Raises SpecbuildError for an unknown activation.
    """
    activation = str(request.attributes["activation"])
    if activation not in _ACTIVATIONS:
        raise SpecbuildError(
            f"RmsSwiglu: activation {activation!r} is unknown, expected one of "
            f"{', '.join(_ACTIVATIONS)}; export the model again"
        )
    return (
        ("HAS_BIAS", int("bias" in request.tensors)),
        ("ACTIVATION", _ACTIVATIONS.index(activation)),
    )


def lower_prefill(request: LoweringRequest) -> Lowering:
    """Return the launches for ``x`` [T, K], ``norm``?, packed ``gate_up``, ``bias``? → ``h`` [T,
    I].

    Raises SpecbuildError if the weight is packed for another K, or the tactic is unknown.
    """
    gemm = dense_gemm(request, "gate_up", PAIRS_STAGING)
    constants = (
        *epilogue(request),
        ("HAS_NORM", int("norm" in request.tensors)),
        ("NORM_ROUNDING", rounding_code(rounding_of("RmsSwiglu", request.attributes))),
        ("EPS", float(request.attributes["eps"])),
    )
    return dense_launches(
        request,
        gemm,
        "rms_swiglu",
        constants=constants,
        rows=("x", "norm"),
        product=("gate_up", "bias", "h"),
    )


def prefill_tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return the tokens of a tile, and whether wgmma computes it."""
    return dense_tactics(request, "gate_up")
