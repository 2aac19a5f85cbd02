"""RmsLowRank on a GPU: a streaming product with its norm, then norms, RoPE and cache writes."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, Tactic
from specbuild.plugins_cuda.linear.many_tokens import dense_tactics
from specbuild.plugins_cuda.linear.projection import lower_projection, projection_of
from specbuild.plugins_cuda.rms_low_rank.entries import (
    PROJECTED,
    entry_constants,
    projected_rows,
    write_entries,
)
from specbuild.plugins_cuda.rms_low_rank.prefill import lower_prefill, prefill_tactics
from specbuild.plugins_cuda.rms_norms import rounding_of


def lower(request: LoweringRequest) -> Lowering:
    """Return the launches; SpecbuildError for a decode launch of more than 256 rows."""
    rounding_of("RmsLowRank", request.attributes)
    if request.phase == "prefill":
        return lower_prefill(request)
    projection = lower_projection(
        request,
        projection_of("RmsLowRank", request),
        folder="rms_low_rank",
        constants=(),
        arguments=("weight", PROJECTED),
        triggers_late=True,
    )
    kernel = Kernel(
        "rms_low_rank", "rms_low_rank_entries", entry_constants(request), file="entries.cu"
    )
    return Lowering(
        (*projection.launches, write_entries(request, kernel)),
        (*projection.workspaces, projected_rows(request)),
    )


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return loads in flight and their place, rows per unit, and whether CTAs also split K."""
    if request.phase == "prefill":
        return prefill_tactics(request)
    return dense_tactics(request, projection_of("RmsLowRank", request))
