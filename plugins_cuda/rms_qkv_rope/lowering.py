"""RmsQkvRope on a GPU: norm as prologue or launch, rotation and cache writing as epilogue."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Tactic
from specbuild.plugins_cuda.linear.many_tokens import dense_tactics
from specbuild.plugins_cuda.linear.projection import lower_projection, projection_of
from specbuild.plugins_cuda.rms_qkv_rope.prefill import lower_prefill, prefill_tactics


def lower(request: LoweringRequest) -> Lowering:
    """The launches; SpecbuildError for a decode launch of more than 256 rows."""
    if request.phase == "prefill":
        return lower_prefill(request)
    tensors, attributes = request.tensors, request.attributes
    _, kv_heads, page_size, width = tensors["k_pool"].shape
    return lower_projection(
        request,
        projection_of("RmsQkvRope", request),
        folder="rms_qkv_rope",
        constants=(
            ("HAS_BIAS", int("bias" in tensors)),
            ("Q_HEADS", int(attributes["q_heads"])),
            ("KV_HEADS", kv_heads),
            ("HEAD_DIM", width),
            ("PAGE_SIZE", page_size),
        ),
        arguments=(
            *("weight", "bias", "cos", "sin", "positions", "write_slot", "k_pool", "v_pool", "q"),
        ),
        triggers_late=True,
    )


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Loads in flight and where they wait, rows a unit, and whether CTAs also split K."""
    if request.phase == "prefill":
        return prefill_tactics(request)
    return dense_tactics(request, projection_of("RmsQkvRope", request))
