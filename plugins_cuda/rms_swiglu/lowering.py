"""RmsSwiglu on a GPU: the norm is a prologue or a launch, the activation an epilogue."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Tactic
from specbuild.plugins_cuda.linear.many_tokens import dense_tactics
from specbuild.plugins_cuda.linear.projection import lower_projection
from specbuild.plugins_cuda.linear.storage import weight_tiles
from specbuild.plugins_cuda.linear.streaming import PAIRS_PER_TILE, Dense
from specbuild.plugins_cuda.rms_norms import rounding_of
from specbuild.plugins_cuda.rms_swiglu.prefill import epilogue, lower_prefill, prefill_tactics


def lower(request: LoweringRequest) -> Lowering:
    """Return the launches; SpecbuildError for a decode launch of more than 256 rows."""
    if request.phase == "prefill":
        return lower_prefill(request)
    rounding_of("RmsSwiglu", request.attributes)
    return lower_projection(
        request,
        _dense(request),
        folder="rms_swiglu",
        constants=epilogue(request),
        arguments=("gate_up", "bias", "h"),
    )


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return loads in flight and their place, rows per unit, and whether CTAs also split K."""
    if request.phase == "prefill":
        return prefill_tactics(request)
    return dense_tactics(request, _dense(request))


def _dense(request: LoweringRequest) -> Dense:
    rows, width = request.tensors["x"].shape
    tiles, blocks, storage = weight_tiles(request.tensors["gate_up"], width)
    normed = "norm" in request.tensors
    # An MLP has so many rows that complete tiles are balanced.
    return Dense(
        "RmsSwiglu", tiles, blocks, rows, normed=normed, storage=storage, unit=PAIRS_PER_TILE
    )
