"""Synthetic GPT-OSS models: named geometries, configs, and weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from specbuild.builder.checkpoint.rope import yarn_attention_factor
from specbuild.builder.families.family import DraftSizes, NamedGeometry, SynthTarget
from specbuild.builder.families.gpt_oss.geometry import (
    ATTENTION_PARTS,
    experts_of,
    feed_forward,
    norm,
    swiglu_limit,
)
from specbuild.builder.synth.configs import yarn_config, yarn_of
from specbuild.builder.synth.fill import BIAS_STD, Fill
from specbuild.builder.synth.tensor import SynthTensor
from specbuild.runtime.engine_dir.feed_forward import MoeFeedForward
from specbuild.runtime.engine_dir.geometry import Rope, TargetGeometry
from specbuild.runtime.engine_dir.rope_scaling import YarnScaling

SLIDING, FULL = "sliding_attention", "full_attention"
SINK_STD = 0.5
EXPERT_BIAS_STD = 0.05
_GATED_RMS = 1.3  # the rms of silu(gate)·(up + 1), if both have the rms _GATE_UP_RMS
_GATE_UP_RMS = 1.2
_MIXTURE = 0.55  # the rms of four experts' weighted sum, relative to one expert


def _experts(count: int, *, inner: int) -> MoeFeedForward:
    return feed_forward(experts=count, experts_per_token=4, inner=inner, storage="mxfp4", limit=7.0)


def _gpt_oss(layers: int, experts: int) -> NamedGeometry:
    target = TargetGeometry(
        model_type="gpt_oss",
        layers=layers,
        hidden=2880,
        vocab=201088,
        q_heads=64,
        kv_heads=8,
        head_dim=64,
        attention=ATTENTION_PARTS,
        norm=norm(1e-5),
        rope=_yarn(factor=32.0, original=4096),
        layer_types=_alternating_types(layers),
        sliding_window=128,
        feed_forwards=(_experts(experts, inner=2880),),
        layer_feed_forwards=(0,) * layers,
        max_positions=131072,
        tied_head=False,
        eos_token_ids=(200002, 199999, 200012),
    )
    return NamedGeometry(target, 199999, 199998, DraftSizes(vocab=32000, inner=17280))


def _tiny() -> NamedGeometry:
    target = TargetGeometry(
        model_type="gpt_oss",
        layers=4,
        hidden=256,
        vocab=4096,
        q_heads=16,
        kv_heads=2,
        head_dim=64,
        attention=ATTENTION_PARTS,
        norm=norm(1e-5),
        rope=_yarn(factor=4.0, original=1024),
        layer_types=_alternating_types(4),
        sliding_window=32,
        feed_forwards=(_experts(16, inner=128),),
        layer_feed_forwards=(0,) * 4,
        max_positions=4096,
        tied_head=False,
        eos_token_ids=(4094, 4093),
    )
    return NamedGeometry(target, 4095, 4093, DraftSizes(vocab=1536, inner=512))


def target_config(g: TargetGeometry, pad_token_id: int) -> dict[str, Any]:
    """Return the ``config.json`` of this geometry, with the fields of the releases."""
    moe = experts_of(g)
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": g.eos_token_ids[0],
        "experts_per_token": moe.experts_per_token,
        "head_dim": g.head_dim,
        "hidden_act": "silu",
        "hidden_size": g.hidden,
        "initial_context_length": yarn_of(g.rope).original_max_positions,
        "initializer_range": 0.02,
        "intermediate_size": moe.inner,
        "layer_types": list(g.layer_types),
        "max_position_embeddings": g.max_positions,
        "model_type": "gpt_oss",
        "num_attention_heads": g.q_heads,
        "num_experts_per_tok": moe.experts_per_token,
        "num_hidden_layers": g.layers,
        "num_key_value_heads": g.kv_heads,
        "num_local_experts": moe.experts,
        "output_router_logits": False,
        "pad_token_id": pad_token_id,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": g.norm.eps,
        "rope_scaling": yarn_config(g.rope),
        "rope_theta": g.rope.theta,
        "router_aux_loss_coef": 0.9,
        "sliding_window": g.sliding_window,
        "swiglu_limit": swiglu_limit(g),
        "tie_word_embeddings": g.tied_head,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": g.vocab,
    }


def _tensor(fill: Fill, g: TargetGeometry, name: str, shape: tuple[int, ...]) -> SynthTensor:
    kind = name.split(".", 3)[3] if ".layers." in name else name
    if kind.endswith("norm.weight"):
        return fill.norm(name, shape)
    if kind.endswith("_blocks"):
        return fill.blocks(name, shape)
    if kind == "mlp.router.weight":
        return fill.router(name, shape)
    output_rms = {
        "mlp.experts.gate_up_proj_scales": _GATE_UP_RMS,
        "mlp.experts.down_proj_scales": fill.contribution / (_GATED_RMS * _MIXTURE),
    }
    if kind in output_rms:
        return fill.scales(name, shape, output_rms[kind])
    std = {
        "self_attn.o_proj.weight": fill.contribution / math.sqrt(g.q_heads * g.head_dim),
        "self_attn.o_proj.bias": BIAS_STD * fill.contribution,
        "self_attn.sinks": SINK_STD,
        "mlp.experts.gate_up_proj_bias": EXPERT_BIAS_STD,
        "mlp.experts.down_proj_bias": EXPERT_BIAS_STD * fill.contribution,
    }.get(kind, BIAS_STD if kind.endswith(".bias") else 1 / math.sqrt(g.hidden))
    return fill.normal(name, shape, std)


def _router_logits(load: Callable[[str], torch.Tensor], normed: torch.Tensor) -> torch.Tensor:
    return normed @ load("mlp.router.weight").T + load("mlp.router.bias")


def _alternating_types(layers: int) -> tuple[str, ...]:
    return tuple((SLIDING, FULL)[layer % 2] for layer in range(layers))


def _yarn(factor: float, original: int) -> Rope:
    return Rope(
        150000.0,
        YarnScaling(
            factor=factor,
            original_max_positions=original,
            attention_factor=yarn_attention_factor(factor),
        ),
    )


GPT_OSS_SYNTH = SynthTarget(
    geometries={
        "gpt-oss-20b": lambda: _gpt_oss(layers=24, experts=32),
        "gpt-oss-120b": lambda: _gpt_oss(layers=36, experts=128),
        "tiny": _tiny,
    },
    config=target_config,
    tensor=_tensor,
    router_logits=_router_logits,
)
