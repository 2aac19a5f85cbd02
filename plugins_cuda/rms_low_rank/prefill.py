"""RmsLowRank in prefill: rms(x) as panels, the tensor-core GEMM, then the entries."""

from __future__ import annotations

from dataclasses import replace

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Tactic
from specbuild.plugins_cuda.prefill_gemm import (
    ROWS_STAGING,
    dense_gemm,
    dense_launches,
    dense_tactics,
)
from specbuild.plugins_cuda.rms_low_rank.entries import (
    PROJECTED,
    entry_constants,
    projected_rows,
    write_entries,
)
from specbuild.plugins_cuda.rms_norms import rounding_code


def lower_prefill(request: LoweringRequest) -> Lowering:
    """Return the launches for ``x`` [T, K] → ``q`` [T, Nq] and the cache entries.

    Raises SpecbuildError if the weight is packed for another K, or the tactic is unknown.
    """
    gemm = dense_gemm(request, "weight", ROWS_STAGING)
    constants = (
        ("HAS_NORM", int("norm" in request.tensors)),
        ("NORM_ROUNDING", rounding_code(str(request.attributes["rounding"]))),
        ("EPS", float(request.attributes["eps"])),
        *entry_constants(request),
    )
    projection = dense_launches(
        request,
        gemm,
        "rms_low_rank",
        constants=constants,
        rows=("x", "norm"),
        product=("weight", PROJECTED),
    )
    kernel = replace(projection.launches[-1].kernel, entry="rms_low_rank_prompt_entries")
    return Lowering(
        (*projection.launches, write_entries(request, kernel)),
        (*projection.workspaces, projected_rows(request)),
    )


def prefill_tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return the tokens of a tile, and whether wgmma computes it."""
    return dense_tactics(request, "weight")
