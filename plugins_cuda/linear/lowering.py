"""Linear on a GPU: a launch that streams the weight, after one that writes panels if required."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Tactic
from specbuild.plugins_cuda.linear.many_tokens import dense_tactics
from specbuild.plugins_cuda.linear.prefill import lower_prefill, prefill_tactics
from specbuild.plugins_cuda.linear.projection import lower_product, projection_of


def lower(request: LoweringRequest) -> Lowering:
    """Return the launches; SpecbuildError for a decode launch of more than 256 rows."""
    if request.phase == "prefill":
        return lower_prefill(request)
    return lower_product(
        request,
        projection_of("Linear", request),
        folder="linear",
        constants=(
            ("HAS_BIAS", int("bias" in request.tensors)),
            ("HAS_RESIDUAL", int("residual" in request.tensors)),
            ("SCALE", float(request.attributes["scale"])),
        ),
        arguments=("x", "weight", "bias", "residual", "y"),
    )


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return loads in flight and their place, rows per unit, and whether CTAs also split K."""
    if request.phase == "prefill":
        return prefill_tactics(request)
    return dense_tactics(request, projection_of("Linear", request))
