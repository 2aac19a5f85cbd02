"""Synthetic models of Qwen3.5 and Qwen3-Next: named geometries, configs, and weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from specbuild.builder.families.family import NamedGeometry, SynthTarget
from specbuild.builder.families.parts.grouped_synth import (
    GroupedSizes,
    Vocabulary,
    config_writer,
    dense,
    named,
    routed,
    tiny_sizes,
)
from specbuild.builder.families.parts.synth_layer import layer_tensor
from specbuild.builder.families.qwen3_5.checkpoint import DENSE, MOE, NEXT, is_stored_less_1
from specbuild.builder.synth.fill import Fill
from specbuild.builder.synth.tensor import SynthTensor
from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    FeedForward,
)
from specbuild.runtime.engine_dir.geometry import (
    LINEAR_ATTENTION,
    AttentionParts,
    GatedDelta,
    Rope,
    TargetGeometry,
)

ARCHITECTURES = {
    DENSE: "Qwen3_5ForCausalLM",
    MOE: "Qwen3_5MoeForCausalLM",
    NEXT: "Qwen3NextForCausalLM",
}
_VOCABULARY = Vocabulary(248320, 248044, (248044, 248046), 248044)
_OLDER_VOCABULARY = Vocabulary(151936, 151643, (151645, 151643), 151643)
_LAYER_TYPES = (LINEAR_ATTENTION,) * 3 + ("full_attention",)
_GATED = AttentionParts(qk_norm="head", output_gate=True)
_NORMS_LESS = 1.0
_A_LOG_STD = 1.0  # a head's decay is exp(-exp(A_log) · softplus)
_GATED_RMS = 0.6  # the rms of the normed output times silu(z), if both have rms 1


def _delta(value_heads: int, width: int = 128, key_heads: int = 16) -> GatedDelta:
    return GatedDelta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_width=width,
        value_width=width,
        taps=4,
    )


def _experts(count: int, per_token: int, inner: int, shared: int) -> BothFeedForward:
    return BothFeedForward(dense=dense(shared), moe=routed(count, per_token, inner), gated=True)


def _sizes(
    hidden: int, layers: int, heads: tuple[int, int], feed_forward: FeedForward, draft_inner: int
) -> GroupedSizes:
    return GroupedSizes(
        hidden=hidden, layers=layers, q_heads=heads[0], kv_heads=heads[1], head_dim=256,
        feed_forward=feed_forward, draft_inner=draft_inner, vocabulary=_VOCABULARY,
        positions=262144, rope=Rope(1e7, width=64), eps=1e-6, attention=_GATED,
        layer_types=_LAYER_TYPES, rounding="after_weight",
    )  # fmt: skip


def _tiny(kind: str, feed_forward: FeedForward) -> NamedGeometry:
    sizes = tiny_sizes(
        feed_forward, layers=4, attention=_GATED, layer_types=_LAYER_TYPES,
        rope=Rope(10000.0, width=16), rounding="after_weight",
    )  # fmt: skip
    return named(kind, sizes, gated_delta=_delta(4, 32, 2))


def _27b() -> NamedGeometry:
    return named(DENSE, _sizes(5120, 64, (24, 4), dense(17408), 17408), gated_delta=_delta(48))


def _35b_a3b() -> NamedGeometry:
    sizes = _sizes(2048, 40, (16, 2), _experts(256, 8, 512, 512), 5632)
    return named(MOE, sizes, gated_delta=_delta(32))


def _next_80b_a3b() -> NamedGeometry:
    sizes = _sizes(2048, 48, (16, 2), _experts(512, 10, 512, 512), 5632)
    return named(NEXT, replace(sizes, vocabulary=_OLDER_VOCABULARY), gated_delta=_delta(32))


def _family_fields(g: TargetGeometry) -> dict[str, Any]:
    delta, (feed_forward,) = g.gated_delta, g.feed_forwards
    assert delta is not None
    fields: dict[str, Any] = {
        "layer_types": list(g.layer_types),
        "linear_conv_kernel_dim": delta.taps,
        "linear_key_head_dim": delta.key_width,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_value_head_dim": delta.value_width,
        "partial_rotary_factor": (g.rope.width or g.head_dim) / g.head_dim,
    }
    if isinstance(feed_forward, DenseFeedForward):
        return fields | {"intermediate_size": feed_forward.inner}
    assert isinstance(feed_forward, BothFeedForward)
    moe = feed_forward.moe
    return fields | {
        "moe_intermediate_size": moe.inner,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.experts_per_token,
        "shared_expert_intermediate_size": feed_forward.dense.inner,
    }


def _tensor(fill: Fill, g: TargetGeometry, name: str, shape: tuple[int, ...]) -> SynthTensor:
    """Return a tensor like that of other layers, with norm weights minus 1."""
    if name.endswith("A_log"):
        return fill.normal(name, shape, _A_LOG_STD)
    if name.endswith("conv1d.weight"):
        return fill.normal(name, shape, shape[-1] ** -0.5)
    if name.endswith("out_proj.weight"):
        return fill.normal(name, shape, fill.contribution / (_GATED_RMS * math.sqrt(shape[1])))
    less = _NORMS_LESS if is_stored_less_1(name) else 0.0
    return layer_tensor(fill, g, name, shape, norms_less=less)


QWEN3_5_SYNTH = SynthTarget(
    geometries={
        "qwen3.5-27b": _27b,
        "qwen3.5-9b": lambda: named(
            DENSE, _sizes(4096, 32, (16, 4), dense(12288), 12288), gated_delta=_delta(32)
        ),
        "qwen3.5-4b": lambda: named(
            DENSE, _sizes(2560, 32, (16, 4), dense(9216), 9216), gated_delta=_delta(32)
        ),
        "qwen3.5-35b-a3b": _35b_a3b,
        "qwen3-next-80b-a3b": _next_80b_a3b,
        "tiny-qwen3.5": lambda: _tiny(DENSE, dense(512)),
        "tiny-qwen3.5-moe": lambda: _tiny(MOE, _experts(16, 4, 64, 128)),
        "tiny-qwen3-next": lambda: _tiny(NEXT, _experts(16, 4, 64, 128)),
    },
    config=config_writer(ARCHITECTURES, _family_fields),
    tensor=_tensor,
    norms_less=_NORMS_LESS,
)
