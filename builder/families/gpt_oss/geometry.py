"""What every GPT-OSS has, whatever its sizes."""

from __future__ import annotations

from specbuild.runtime.engine_dir.feed_forward import ClampedSwiglu, MoeFeedForward
from specbuild.runtime.engine_dir.geometry import AttentionParts, Norm, TargetGeometry

ATTENTION_PARTS = AttentionParts(qkv_bias=True, output_bias=True, sinks=True)
SWIGLU_ALPHA = 1.702  # no configuration names it


def norm(eps: float) -> Norm:
    """RMSNorm: the weight multiplies before the cast back."""
    return Norm(eps, "after_weight")


def feed_forward(
    *, experts: int, experts_per_token: int, inner: int, storage: str, limit: float
) -> MoeFeedForward:
    """Every layer's: biases at the router and in the experts, the clamped activation."""
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
    """The experts of every layer."""
    (moe,) = g.feed_forwards
    assert isinstance(moe, MoeFeedForward)
    return moe


def swiglu_limit(g: TargetGeometry) -> float:
    """What the experts' activation is clamped at."""
    activation = experts_of(g).activation
    assert isinstance(activation, ClampedSwiglu)
    return activation.limit
