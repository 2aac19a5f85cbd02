"""RmsQkvRope on a GPU: norm as prologue or launch, rotation and cache writing as epilogue.

Norms of heads need complete heads, which no CTA has. They and the rotation are therefore a separate
launch.
"""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, Tactic
from specbuild.plugins_cuda.linear.many_tokens import dense_tactics
from specbuild.plugins_cuda.linear.projection import lower_projection, projection_of
from specbuild.plugins_cuda.rms_norms import rounding_code, rounding_of
from specbuild.plugins_cuda.rms_qkv_rope.heads import (
    head_sizes,
    heads_threads,
    norms_heads,
    projected_keys,
    with_heads,
)
from specbuild.plugins_cuda.rms_qkv_rope.prefill import lower_prefill, prefill_tactics

_HEADS_THREADS = 128


def lower(request: LoweringRequest) -> Lowering:
    """Return the launches; SpecbuildError for a decode launch of more than 256 rows."""
    if request.phase == "prefill":
        return lower_prefill(request)
    tensors, attributes = request.tensors, request.attributes
    sizes = head_sizes(request)
    rounding_of("RmsQkvRope", attributes)
    lowering = lower_projection(
        request,
        projection_of("RmsQkvRope", request),
        folder="rms_qkv_rope",
        constants=(
            ("HAS_BIAS", int("bias" in tensors)),
            ("HEAD_NORMS", int(norms_heads(request))),
            *sizes,
        ),
        arguments=(
            *("weight", "bias", "cos", "sin", "positions", "write_slot"),
            *(projected_keys(request), "v_pool", "q"),
        ),
        triggers_late=True,
    )
    threads = heads_threads(request, _HEADS_THREADS)
    constants = (
        *sizes,
        ("THREADS", threads),
        ("HEAD_ROUNDING", rounding_code(str(attributes["head_rounding"]))),
        ("EPS", float(attributes["eps"])),
    )
    kernel = Kernel("rms_qkv_rope", "rms_qkv_rope_heads", constants, file="normed_heads.cu")
    return with_heads(request, lowering, kernel, threads)


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return the tactics: loads in flight, their memory, rows per unit, and use of split-K."""
    if request.phase == "prefill":
        return prefill_tactics(request)
    return dense_tactics(request, projection_of("RmsQkvRope", request))
