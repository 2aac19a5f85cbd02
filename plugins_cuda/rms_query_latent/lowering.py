"""RmsQueryLatent on a GPU: the norm is a prologue or a launch, RoPE and cache write an epilogue."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Tactic
from specbuild.plugins_cuda.linear.many_tokens import dense_tactics
from specbuild.plugins_cuda.linear.projection import lower_projection, projection_of
from specbuild.plugins_cuda.rms_query_latent.prefill import lower_prefill, prefill_tactics


def lower(request: LoweringRequest) -> Lowering:
    """Return the launches; SpecbuildError for a decode launch of more than 256 rows."""
    if request.phase == "prefill":
        return lower_prefill(request)
    tensors = request.tensors
    return lower_projection(
        request,
        projection_of("RmsQueryLatent", request),
        folder="rms_query_latent",
        constants=(
            ("HAS_BIAS", int("bias" in tensors)),
            ("Q_HEADS", int(request.attributes["q_heads"])),
            ("HEAD_DIM", tensors["q"].shape[2]),
            ("LATENT", tensors["c_pool"].shape[3]),
        ),
        arguments=("weight", "bias", "cos", "sin", "positions", "write_slot", "c_pool", "q"),
        triggers_late=True,
    )


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return loads in flight and their place, rows per unit, and whether CTAs also split K."""
    if request.phase == "prefill":
        return prefill_tactics(request)
    return dense_tactics(request, projection_of("RmsQueryLatent", request))
