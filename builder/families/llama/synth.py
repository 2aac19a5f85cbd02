"""Synthetic models of Llama and similar ones: named geometries, configs, and weights."""

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
from specbuild.runtime.engine_dir.feed_forward import DenseFeedForward, FeedForward, MoeFeedForward
from specbuild.runtime.engine_dir.geometry import AttentionParts, Rope, TargetGeometry
from specbuild.runtime.engine_dir.rope_scaling import Llama3Scaling

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mimo": "MiMoForCausalLM",
}
_QK_NORMS = AttentionParts(qk_norm="head")
_QKV_BIASES = AttentionParts(qkv_bias=True)
# Configs of Qwen3-MoE have the width of dense layers, but the releases have no dense layer.
_UNUSED_INNER = 6144

_LLAMA = Vocabulary(128256, 128000, (128001, 128008, 128009), 128004)
_QWEN = Vocabulary(151936, 151643, (151645, 151643), 151643)
_MIMO = Vocabulary(151680, 151643, (151645, 151643), 151643)


def _llama(hidden: int, layers: int, heads: int, inner: int, factor: float) -> GroupedSizes:
    scaling = Llama3Scaling(
        factor=factor, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    return GroupedSizes(
        hidden=hidden, layers=layers, q_heads=heads, kv_heads=8, head_dim=hidden // heads,
        feed_forward=dense(inner), draft_inner=inner, vocabulary=_LLAMA,
        positions=131072, rope=Rope(500000.0, scaling), eps=1e-5,
    )  # fmt: skip


def _qwen(
    hidden: int, layers: int, heads: tuple[int, int], feed_forward: FeedForward, draft_inner: int
) -> GroupedSizes:
    return GroupedSizes(
        hidden=hidden, layers=layers, q_heads=heads[0], kv_heads=heads[1], head_dim=128,
        feed_forward=feed_forward, draft_inner=draft_inner, vocabulary=_QWEN,
        positions=40960, rope=Rope(1e6), eps=1e-6, attention=_QK_NORMS,
    )  # fmt: skip


def _mimo() -> GroupedSizes:
    return GroupedSizes(
        hidden=4096, layers=36, q_heads=32, kv_heads=8, head_dim=128, feed_forward=dense(11008),
        draft_inner=11008, vocabulary=_MIMO, positions=32768, rope=Rope(640000.0), eps=1e-5,
        attention=_QKV_BIASES,
    )  # fmt: skip


def _family_fields(g: TargetGeometry) -> dict[str, Any]:
    """Return the config's fields that only this family has."""
    (feed_forward,) = g.feed_forwards
    fields: dict[str, Any] = {"attention_bias": g.attention.qkv_bias}
    if isinstance(feed_forward, DenseFeedForward):
        fields["intermediate_size"] = feed_forward.inner
    if isinstance(feed_forward, MoeFeedForward):
        fields |= {
            "decoder_sparse_step": 1,
            "intermediate_size": _UNUSED_INNER,
            "mlp_only_layers": [],
            "moe_intermediate_size": feed_forward.inner,
            "norm_topk_prob": True,
            "num_experts": feed_forward.experts,
            "num_experts_per_tok": feed_forward.experts_per_token,
        }
    return fields


LLAMA_SYNTH = SynthTarget(
    gguf={"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"},
    geometries={
        "llama-3.2-1b": lambda: named("llama", _llama(2048, 16, 32, 8192, 32.0)),
        "llama-3.1-8b": lambda: named("llama", _llama(4096, 32, 32, 14336, 8.0)),
        "llama-3.3-70b": lambda: named("llama", _llama(8192, 80, 64, 28672, 8.0)),
        "qwen3-8b": lambda: named("qwen3", _qwen(4096, 36, (32, 8), dense(12288), 12288)),
        "qwen3-32b": lambda: named("qwen3", _qwen(5120, 64, (64, 8), dense(25600), 25600)),
        "qwen3-30b-a3b": lambda: named(
            "qwen3_moe", _qwen(2048, 48, (32, 4), routed(128, 8, 768), 12288)
        ),
        "mimo-7b": lambda: named("mimo", _mimo()),
        "tiny-llama": lambda: named("llama", tiny_sizes(dense(512))),
        "tiny-qwen3": lambda: named("qwen3", tiny_sizes(dense(512), attention=_QK_NORMS)),
        "tiny-qwen3-moe": lambda: named(
            "qwen3_moe", tiny_sizes(routed(16, 4, 64), attention=_QK_NORMS)
        ),
        "tiny-mimo": lambda: named("mimo", tiny_sizes(dense(512), attention=_QKV_BIASES)),
    },
    config=config_writer(_ARCHITECTURES, _family_fields),
)
