"""Synthetic models of Llama and its kin: named geometries, configurations, and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specbuild.builder.families.family import DraftSizes, NamedGeometry, SynthTarget
from specbuild.builder.families.parts.synth_layer import gate_logits, layer_tensor
from specbuild.builder.synth.configs import rope_config
from specbuild.runtime.engine_dir.geometry import (
    AttentionParts,
    DenseFeedForward,
    FeedForward,
    MoeFeedForward,
    Norm,
    Rope,
    Swiglu,
    TargetGeometry,
)
from specbuild.runtime.engine_dir.rope_scaling import Llama3Scaling

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mimo": "MiMoForCausalLM",
}
_ATTENTION = {
    "llama": AttentionParts(),
    "qwen3": AttentionParts(qk_norm="head"),
    "qwen3_moe": AttentionParts(qk_norm="head"),
    "mimo": AttentionParts(qkv_bias=True),
}
# A config of Qwen3-MoE names the width of dense layers, which the releases have not.
_UNUSED_INNER = 6144


@dataclass(frozen=True)
class _Vocabulary:
    """Ids from ``special`` on are no text."""

    size: int
    special: int
    eos: tuple[int, ...]
    pad: int


_LLAMA = _Vocabulary(128256, 128000, (128001, 128008, 128009), 128004)
_QWEN = _Vocabulary(151936, 151643, (151645, 151643), 151643)
_MIMO = _Vocabulary(151680, 151643, (151645, 151643), 151643)
_TINY = _Vocabulary(4096, 4093, (4094,), 4095)


@dataclass(frozen=True)
class _Sizes:
    """What differs between the geometries; the KV heads divide the query heads."""

    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    feed_forward: FeedForward
    draft: DraftSizes
    vocabulary: _Vocabulary
    positions: int
    rope: Rope
    eps: float


def _named(model_type: str, s: _Sizes) -> NamedGeometry:
    target = TargetGeometry(
        model_type=model_type,
        layers=s.layers,
        hidden=s.hidden,
        vocab=s.vocabulary.size,
        q_heads=s.q_heads,
        kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        attention=_ATTENTION[model_type],
        norm=Norm(s.eps, "before_weight"),
        rope=s.rope,
        layer_types=("full_attention",) * s.layers,
        sliding_window=0,
        feed_forwards=(s.feed_forward,),
        layer_feed_forwards=(0,) * s.layers,
        max_positions=s.positions,
        # A head of its own, where that of small releases is tied: it says which token follows.
        tied_head=False,
        eos_token_ids=s.vocabulary.eos,
    )
    return NamedGeometry(target, s.vocabulary.pad, s.vocabulary.special, s.draft)


def _dense(inner: int) -> DenseFeedForward:
    return DenseFeedForward(inner=inner, activation=Swiglu())


def _experts(count: int, chosen: int, inner: int) -> MoeFeedForward:
    return MoeFeedForward(
        experts=count,
        experts_per_token=chosen,
        inner=inner,
        storage="bf16",
        activation=Swiglu(),
        gating="softmax_selected",
    )


def _llama(hidden: int, layers: int, heads: int, inner: int, factor: float) -> _Sizes:
    scaling = Llama3Scaling(
        factor=factor, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    return _Sizes(
        hidden=hidden, layers=layers, q_heads=heads, kv_heads=8, head_dim=hidden // heads,
        feed_forward=_dense(inner), draft=DraftSizes(32000, inner), vocabulary=_LLAMA,
        positions=131072, rope=Rope(500000.0, scaling), eps=1e-5,
    )  # fmt: skip


def _qwen(
    hidden: int, layers: int, heads: tuple[int, int], feed_forward: FeedForward, draft_inner: int
) -> _Sizes:
    return _Sizes(
        hidden=hidden, layers=layers, q_heads=heads[0], kv_heads=heads[1], head_dim=128,
        feed_forward=feed_forward, draft=DraftSizes(32000, draft_inner), vocabulary=_QWEN,
        positions=40960, rope=Rope(1e6), eps=1e-6,
    )  # fmt: skip


def _mimo() -> _Sizes:
    return _Sizes(
        hidden=4096, layers=36, q_heads=32, kv_heads=8, head_dim=128, feed_forward=_dense(11008),
        draft=DraftSizes(32000, 11008), vocabulary=_MIMO, positions=32768, rope=Rope(640000.0),
        eps=1e-5,
    )  # fmt: skip


def _tiny(feed_forward: FeedForward) -> _Sizes:
    return _Sizes(
        hidden=256, layers=3, q_heads=4, kv_heads=2, head_dim=64, feed_forward=feed_forward,
        draft=DraftSizes(1536, 512), vocabulary=_TINY, positions=4096, rope=Rope(10000.0), eps=1e-5,
    )  # fmt: skip


def target_config(g: TargetGeometry, pad_token_id: int) -> dict[str, Any]:
    """The ``config.json`` of this geometry, as the releases spell it."""
    (feed_forward,) = g.feed_forwards
    fields: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[g.model_type]],
        "attention_bias": g.attention.qkv_bias,
        "eos_token_id": list(g.eos_token_ids),
        "head_dim": g.head_dim,
        "hidden_act": "silu",
        "hidden_size": g.hidden,
        "max_position_embeddings": g.max_positions,
        "model_type": g.model_type,
        "num_attention_heads": g.q_heads,
        "num_hidden_layers": g.layers,
        "num_key_value_heads": g.kv_heads,
        "pad_token_id": pad_token_id,
        "rms_norm_eps": g.norm.eps,
        "rope_scaling": rope_config(g.rope),
        "rope_theta": g.rope.theta,
        "tie_word_embeddings": g.tied_head,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": g.vocab,
    }
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
    geometries={
        "llama-3.2-1b": lambda: _named("llama", _llama(2048, 16, 32, 8192, 32.0)),
        "llama-3.1-8b": lambda: _named("llama", _llama(4096, 32, 32, 14336, 8.0)),
        "llama-3.3-70b": lambda: _named("llama", _llama(8192, 80, 64, 28672, 8.0)),
        "qwen3-8b": lambda: _named("qwen3", _qwen(4096, 36, (32, 8), _dense(12288), 12288)),
        "qwen3-32b": lambda: _named("qwen3", _qwen(5120, 64, (64, 8), _dense(25600), 25600)),
        "qwen3-30b-a3b": lambda: _named(
            "qwen3_moe", _qwen(2048, 48, (32, 4), _experts(128, 8, 768), 12288)
        ),
        "mimo-7b": lambda: _named("mimo", _mimo()),
        "tiny-llama": lambda: _named("llama", _tiny(_dense(512))),
        "tiny-qwen3": lambda: _named("qwen3", _tiny(_dense(512))),
        "tiny-qwen3-moe": lambda: _named("qwen3_moe", _tiny(_experts(16, 4, 64))),
        "tiny-mimo": lambda: _named("mimo", _tiny(_dense(512))),
    },
    config=target_config,
    tensor=layer_tensor,
    router_logits=gate_logits,
)
