"""Synthetic models of Gemma 4's text model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from specbuild.builder.families.family import NamedGeometry
from specbuild.builder.families.gemma4.checkpoint import ACTIVATION
from specbuild.builder.families.parts.grouped_synth import (
    GroupedSizes,
    Vocabulary,
    config_writer,
    named,
    tiny_sizes,
)
from specbuild.builder.families.parts.synth_layer import layer_tensor
from specbuild.builder.synth.configs import rope_config
from specbuild.builder.synth.fill import Fill
from specbuild.builder.synth.tensor import SynthTensor
from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    FeedForward,
    Geglu,
    MoeFeedForward,
)
from specbuild.runtime.engine_dir.geometry import (
    AttentionParts,
    LayerInputs,
    Multipliers,
    Rope,
    TargetGeometry,
    WindowHeads,
)
from specbuild.runtime.engine_dir.rope_scaling import ProportionalScaling

_CLASSES = {
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
}
_VOCABULARY = Vocabulary(262144, 262100, (1, 106), 0)
_WINDOWS = ("sliding_attention",) * 5 + ("full_attention",)
_ATTENTION = AttentionParts(qk_norm="head", scale=1.0, value_norm=True)
_K_AS_V = replace(_ATTENTION, keys_as_values=True)
_ROPE = Rope(1e6, ProportionalScaling(factor=1.0, share=0.25))
_CAP = 30.0


def _geglu(inner: int) -> DenseFeedForward:
    return DenseFeedForward(inner=inner, activation=Geglu())


def _with_experts(inner: int, experts: tuple[int, int, int]) -> BothFeedForward:
    """Return a dense feed-forward beside experts: their count, those per token, and their width."""
    count, per_token, width = experts
    moe = MoeFeedForward(
        experts=count, experts_per_token=per_token, inner=width, storage="bf16", activation=Geglu(),
        gating="softmax_selected", expert_scale=True,
    )  # fmt: skip
    return BothFeedForward(dense=_geglu(inner), moe=moe, normed_apart=True)


def _large(feed_forward: FeedForward, **sizes: Any) -> GroupedSizes:
    """Return the sizes of models without layer inputs; ``sizes`` override them."""
    common: dict[str, Any] = {
        "feed_forward": feed_forward, "head_dim": 512, "vocabulary": _VOCABULARY,
        "positions": 262144, "rope": _ROPE, "eps": 1e-6, "attention": _K_AS_V,
        "layer_types": _WINDOWS, "window": 1024, "rounding": "after_weight",
    }  # fmt: skip
    return GroupedSizes(**(common | sizes))


def _small(layers: int, shared: int, inner: int, wide: int, **sizes: Any) -> GroupedSizes:
    """Return the sizes of E2B and E4B, whose last layers share caches."""
    return _large(
        _geglu(wide), layers=layers, head_dim=512, attention=_ATTENTION, positions=131072,
        window=512, first_layers=(_geglu(inner),) * (layers - shared), draft_inner=inner, **sizes,
    )  # fmt: skip


def _geometry(
    sizes: GroupedSizes, local: WindowHeads, inputs: int = 0, **parts: Any
) -> NamedGeometry:
    vocabulary = sizes.vocabulary.size
    return named(
        "gemma4_text",
        sizes,
        norm_places="both",
        window_rope=Rope(10000.0),
        window_heads=local,
        multipliers=Multipliers(embedding=math.sqrt(sizes.hidden), logits_cap=_CAP),
        layer_inputs=LayerInputs(width=inputs, vocab=vocabulary) if inputs else None,
        layer_scale=True,
        **parts,
    )


def _31b() -> NamedGeometry:
    sizes = _large(_geglu(21504), hidden=5376, layers=60, q_heads=32, kv_heads=4, draft_inner=21504)
    return _geometry(sizes, WindowHeads(kv_heads=16, head_dim=256))


def _26b_a4b() -> NamedGeometry:
    both = _with_experts(2112, (128, 8, 704))
    sizes = _large(both, hidden=2816, layers=30, q_heads=16, kv_heads=2, draft_inner=8448)
    return _geometry(sizes, WindowHeads(kv_heads=8, head_dim=256))


def _e4b() -> NamedGeometry:
    sizes = _small(42, 18, 10240, 10240, hidden=2560, q_heads=8, kv_heads=2)
    return _geometry(sizes, WindowHeads(kv_heads=2, head_dim=256), 256, shared_caches=18)


def _e2b() -> NamedGeometry:
    types = (*_WINDOWS[1:5], "full_attention")
    sizes = _small(35, 20, 6144, 12288, hidden=1536, q_heads=8, kv_heads=1)
    sizes = replace(sizes, layer_types=types)
    return _geometry(sizes, WindowHeads(kv_heads=1, head_dim=256), 256, shared_caches=20)


def _tiny(feed_forward: FeedForward, attention: AttentionParts, **parts: Any) -> NamedGeometry:
    sizes = tiny_sizes(
        feed_forward, layers=6, kv_heads=1, attention=attention, window=64, rope=_ROPE,
        layer_types=("sliding_attention", "sliding_attention", "full_attention"),
        rounding="after_weight",
    )  # fmt: skip
    local = WindowHeads(kv_heads=2 if attention.keys_as_values else 1, head_dim=32)
    return _geometry(sizes, local, **parts)


GEOMETRIES: dict[str, Callable[[], NamedGeometry]] = {
    "gemma-4-31b": _31b,
    "gemma-4-26b-a4b": _26b_a4b,
    "gemma-4-e4b": _e4b,
    "gemma-4-e2b": _e2b,
    "tiny-gemma4": lambda: _tiny(_geglu(512), _ATTENTION, inputs=32, shared_caches=3),
    "tiny-gemma4-moe": lambda: _tiny(_with_experts(256, (16, 4, 128)), _K_AS_V),
}


def _family_fields(g: TargetGeometry) -> dict[str, Any]:
    assert g.multipliers is not None
    local, local_rope = g.window_heads or g.heads_of(g.layers - 1), g.window_rope or Rope(10000.0)
    first, last = g.feed_forward(0), g.feed_forward(g.layers - 1)
    dense, widest = (f.dense if isinstance(f, BothFeedForward) else f for f in (first, last))
    assert isinstance(dense, DenseFeedForward) and isinstance(widest, DenseFeedForward)
    moe, inputs = g.moe, g.layer_inputs
    return {
        "attention_k_eq_v": g.attention.keys_as_values,
        "enable_moe_block": moe is not None,
        "final_logit_softcapping": g.multipliers.logits_cap,
        "global_head_dim": g.head_dim,
        "head_dim": local.head_dim,
        "hidden_act": None,
        "hidden_activation": ACTIVATION,
        "hidden_size_per_layer_input": inputs.width if inputs else 0,
        "intermediate_size": dense.inner,
        "layer_types": list(g.layer_types),
        "moe_intermediate_size": moe.inner if moe else None,
        "num_experts": moe.experts if moe else None,
        "num_global_key_value_heads": g.kv_heads if g.attention.keys_as_values else None,
        "num_key_value_heads": local.kv_heads,
        "num_kv_shared_layers": g.shared_caches,
        "rope_parameters": {
            "full_attention": {"rope_theta": g.rope.theta, **(rope_config(g.rope) or {})},
            "sliding_attention": {"rope_theta": local_rope.theta, "rope_type": "default"},
        },
        "sliding_window": g.sliding_window or None,
        "top_k_experts": moe.experts_per_token if moe else None,
        "use_double_wide_mlp": widest.inner == 2 * dense.inner,
        "vocab_size_per_layer_input": inputs.vocab if inputs else g.vocab,
    }


_with_common_fields = config_writer(_CLASSES, _family_fields)


def config(g: TargetGeometry, pad_token_id: int) -> dict[str, Any]:
    """Return the ``config.json`` of a geometry and a padding token; each layer type has a RoPE."""
    fields = _with_common_fields(g, pad_token_id)
    return {name: fields[name] for name in fields if name not in ("rope_scaling", "rope_theta")}


def tensor(fill: Fill, g: TargetGeometry, name: str, shape: tuple[int, ...]) -> SynthTensor:
    """Return a tensor like that of other layers; Gemma 4's other parts contribute as little."""
    part = name.rpartition("layers.")[2].partition(".")[2]
    means = {
        "layer_scalar": 1.0,
        "post_per_layer_input_norm.weight": fill.contribution,
        "router.per_expert_scale": 1.0,
        "router.scale": math.sqrt(g.hidden),
    }
    if part == "router.proj.weight":
        return fill.router(name, shape)
    if part in means or "_feedforward_layernorm_" in part:
        return fill.norm(name, shape, means.get(part, 1.0))
    if name.endswith("embed_tokens_per_layer.weight"):
        assert g.layer_inputs is not None
        return fill.normal(name, shape, g.layer_inputs.width**-0.5)
    return layer_tensor(fill, g, name, shape)


def router_logits(load: Callable[[str], torch.Tensor], normed: torch.Tensor) -> torch.Tensor:
    """Return the logits [n, E] of a router, which normalizes the rows [n, H] itself."""
    scale = load("router.scale") * normed.shape[1] ** -0.5
    return F.rms_norm(normed, (normed.shape[1],)) * scale @ load("router.proj.weight").T
