"""RmsQkvRope of a prompt chunk: panels of normalized x, the tensor-core GEMM, norms of heads."""

from __future__ import annotations

from dataclasses import replace

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Tactic
from specbuild.plugins_cuda.prefill_gemm import (
    ROWS_STAGING,
    ROWS_THREADS,
    dense_gemm,
    dense_launches,
    dense_tactics,
)
from specbuild.plugins_cuda.rms_norms import rounding_code, rounding_of
from specbuild.plugins_cuda.rms_qkv_rope.heads import (
    head_sizes,
    heads_threads,
    norms_heads,
    projected_keys,
    with_heads,
)


def lower_prefill(request: LoweringRequest) -> Lowering:
    """Return the launches: ``x`` [T, K] → rotated ``q`` [T, Hq, D], K and V in their page slots.

    Raises SpecbuildError if the weight is packed for another K, or the tactic is unknown.
    """
    gemm = dense_gemm(request, "weight", ROWS_STAGING)
    tensors, attributes = request.tensors, request.attributes
    threads = heads_threads(request, ROWS_THREADS)
    constants = (
        ("THREADS", threads),
        ("HAS_NORM", int("norm" in tensors)),
        ("HAS_BIAS", int("bias" in tensors)),
        ("NORM_ROUNDING", rounding_code(rounding_of("RmsQkvRope", attributes))),
        ("HEAD_NORMS", int(norms_heads(request))),
        ("HEAD_ROUNDING", rounding_code(str(attributes["head_rounding"]))),
        ("EPS", float(attributes["eps"])),
        *head_sizes(request),
    )
    lowering = dense_launches(
        request,
        gemm,
        "rms_qkv_rope",
        constants=constants,
        rows=("x", "norm"),
        product=(
            *("weight", "bias", "cos", "sin", "positions", "write_slot"),
            *(projected_keys(request), "v_pool", "q"),
        ),
    )
    kernel = replace(lowering.launches[-1].kernel, entry="rms_qkv_rope_heads")
    return with_heads(request, lowering, kernel, threads)


def prefill_tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return the tactics: the tokens of a tile, and whether wgmma computes it."""
    return dense_tactics(request, "weight")
