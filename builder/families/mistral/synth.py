"""Synthetic Mistral, Ministral 3 and Mixtral models: named geometries and configs."""

from __future__ import annotations

from typing import Any

from specbuild.builder.families.family import SynthTarget
from specbuild.builder.families.parts.grouped_synth import (
    GroupedSizes,
    Vocabulary,
    config_writer,
    dense,
    named,
    routed,
    tiny_sizes,
)
from specbuild.builder.synth.configs import yarn_config, yarn_of
from specbuild.runtime.engine_dir.feed_forward import DenseFeedForward, routed_part
from specbuild.runtime.engine_dir.geometry import AttentionParts, QueryGrowth, Rope, TargetGeometry
from specbuild.runtime.engine_dir.rope_scaling import YarnScaling

MODEL_TYPES = {
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
_TEKKEN = Vocabulary(131072, 131072, (2,), 11)
_PIECES = Vocabulary(32000, 32000, (2,), 0)


def _yarn(original: int) -> Rope:
    """Return Ministral 3's RoPE, whose factors of cosine and sine cancel each other."""
    return Rope(1e6, YarnScaling(factor=16.0, original_max_positions=original, truncate=True))


def _growth(original: int) -> AttentionParts:
    return AttentionParts(query_growth=QueryGrowth(beta=0.1, original_max_positions=original))


def _mistral_small() -> GroupedSizes:
    return GroupedSizes(
        hidden=5120, layers=40, q_heads=32, kv_heads=8, head_dim=128, feed_forward=dense(32768),
        draft_inner=32768, vocabulary=_TEKKEN, positions=131072, rope=Rope(1e9), eps=1e-5,
    )  # fmt: skip


def _ministral() -> GroupedSizes:
    return GroupedSizes(
        hidden=4096, layers=34, q_heads=32, kv_heads=8, head_dim=128, feed_forward=dense(14336),
        draft_inner=14336, vocabulary=_TEKKEN, positions=262144, rope=_yarn(16384), eps=1e-5,
        attention=_growth(16384),
    )  # fmt: skip


def _mixtral() -> GroupedSizes:
    return GroupedSizes(
        hidden=4096, layers=32, q_heads=32, kv_heads=8, head_dim=128,
        feed_forward=routed(8, 2, 14336), draft_inner=14336, vocabulary=_PIECES, positions=32768,
        rope=Rope(1e6), eps=1e-5,
    )  # fmt: skip


def _family_fields(g: TargetGeometry) -> dict[str, Any]:
    """Return the config's fields that only this family has."""
    fields: dict[str, Any] = {"sliding_window": g.sliding_window or None}
    feed_forward, growth = g.feed_forward(0), g.attention.query_growth
    moe = routed_part(feed_forward)
    if isinstance(feed_forward, DenseFeedForward):
        fields["intermediate_size"] = feed_forward.inner
    elif moe is not None:
        fields |= {
            "intermediate_size": moe.inner,
            "num_experts_per_tok": moe.experts_per_token,
            "num_local_experts": moe.experts,
        }
    if growth is not None:
        yarn = yarn_of(g.rope)
        fields |= {
            "rope_parameters": {
                **yarn_config(g.rope),
                "llama_4_scaling_beta": growth.beta,
                "mscale": yarn.attention_factor,
                "mscale_all_dim": yarn.attention_factor,
                "rope_theta": g.rope.theta,
            },
            "rope_scaling": None,
        }
    return fields


MISTRAL_SYNTH = SynthTarget(
    geometries={
        "mistral-small-24b": lambda: named("mistral", _mistral_small()),
        "ministral-3-8b": lambda: named("ministral3", _ministral()),
        "mixtral-8x7b": lambda: named("mixtral", _mixtral()),
        "tiny-mistral": lambda: named(
            "mistral", tiny_sizes(dense(512), layer_types=("sliding_attention",), window=64)
        ),
        "tiny-ministral3": lambda: named(
            "ministral3", tiny_sizes(dense(512), rope=_yarn(256), attention=_growth(256))
        ),
        "tiny-mixtral": lambda: named("mixtral", tiny_sizes(routed(16, 4, 64))),
    },
    config=config_writer(MODEL_TYPES, _family_fields),
)
