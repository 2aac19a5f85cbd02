"""The properties that all GPT-OSS models share."""

from __future__ import annotations

from specbuild.runtime.engine_dir.feed_forward import ClampedSwiglu, MoeFeedForward
from specbuild.runtime.engine_dir.geometry import AttentionParts, Norm, TargetGeometry

ATTENTION_PARTS = AttentionParts(qkv_bias=True, output_bias=True, sinks=True)
SWIGLU_ALPHA = 1.702  # the configs do not have it


def norm(eps: float) -> Norm:
    """Return the RMSNorm, whose weight multiplies before the cast back."""
    return Norm(eps, "after_weight")


def feed_forward(
    *, experts: int, experts_per_token: int, inner: int, storage: str, limit: float
) -> MoeFeedForward:
    """Return every layer's experts, with biases and the clamped activation."""
    return MoeFeedForward(
        experts=experts,
        experts_per_token=experts_per_token,
        inner=inner,
        storage=storage,
        activation=ClampedSwiglu(alpha=SWIGLU_ALPHA, limit=limit),
        gating="softmax_selected",
        router_bias=True,
        bias=True,
    )


def experts_of(g: TargetGeometry) -> MoeFeedForward:
    """Return the experts, which are the same in every layer."""
    (moe,) = g.feed_forwards
    assert isinstance(moe, MoeFeedForward)
    return moe


def swiglu_limit(g: TargetGeometry) -> float:
    """Return the bound at which the experts' activation is clamped."""
    activation = experts_of(g).activation
    assert isinstance(activation, ClampedSwiglu)
    return activation.limit
