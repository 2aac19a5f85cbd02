"""RmsIndexer in prefill: rms(x) as panels, then the tensor-core GEMM."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Tactic
from specbuild.plugins_cuda.prefill_gemm import (
    ROWS_STAGING,
    dense_gemm,
    dense_launches,
    dense_tactics,
)
from specbuild.runtime.engine_dir.plan import ITEM_BYTES


def lower_prefill(request: LoweringRequest) -> Lowering:
    """Return the launches for ``x`` [T, K] → ``q`` [T, n_idx, d], ``head_weights`` and cached keys.

    Raises SpecbuildError if the weight is packed for another K, or the tactic is unknown.
    """
    gemm = dense_gemm(request, "weight", ROWS_STAGING)
    constants = (
        ("HAS_NORM", int("norm" in request.tensors)),
        ("EPS", float(request.attributes["eps"])),
        ("HEADS", int(request.attributes["heads"])),
        ("WIDTH", request.tensors["key_pool"].shape[3]),
        ("KEY_BYTES", ITEM_BYTES[request.tensors["key_pool"].dtype]),
    )
    return dense_launches(
        request,
        gemm,
        "rms_indexer",
        constants=constants,
        rows=("x", "norm"),
        product=("weight", "write_slot", "key_pool", "q", "head_weights"),
    )


def prefill_tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return the tokens of a tile, and whether wgmma computes it."""
    return dense_tactics(request, "weight")
