"""``config.json`` and ``generation_config.json`` of a geometry, as the releases spell them."""

from __future__ import annotations

from typing import Any

from specbuild.runtime.engine_dir.manifest import DraftGeometry, Rope, TargetGeometry


def target_config(g: TargetGeometry, pad_token_id: int) -> dict[str, Any]:
    """What ``read_target`` reads this geometry from."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": g.eos_token_ids[0],
        "experts_per_token": g.experts_per_token,
        "head_dim": g.head_dim,
        "hidden_act": "silu",
        "hidden_size": g.hidden,
        "initial_context_length": g.rope.original_max_positions,
        "initializer_range": 0.02,
        "intermediate_size": g.expert_inner,
        "layer_types": list(g.layer_types),
        "max_position_embeddings": g.max_positions,
        "model_type": "gpt_oss",
        "num_attention_heads": g.q_heads,
        "num_experts_per_tok": g.experts_per_token,
        "num_hidden_layers": g.layers,
        "num_key_value_heads": g.kv_heads,
        "num_local_experts": g.experts,
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
        "rms_norm_eps": g.rms_eps,
        "rope_scaling": _rope_scaling(g.rope),
        "rope_theta": g.rope.theta,
        "router_aux_loss_coef": 0.9,
        "sliding_window": g.sliding_window,
        "swiglu_limit": g.swiglu_limit,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": g.vocab,
    }


def generation_config(g: TargetGeometry, pad_token_id: int) -> dict[str, Any]:
    """Where the list of EOS tokens stands."""
    return {
        "do_sample": False,
        "eos_token_id": list(g.eos_token_ids),
        "pad_token_id": pad_token_id,
    }


def draft_config(d: DraftGeometry, target: TargetGeometry) -> dict[str, Any]:
    """What ``read_draft`` reads this geometry from."""
    return {
        "architectures": [d.architecture],
        "attention_bias": False,
        "draft_vocab_size": d.vocab,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(d.taps),
            "use_aux_hidden_state": True,
        },
        "head_dim": d.head_dim,
        "hidden_act": "silu",
        "hidden_size": d.hidden,
        "intermediate_size": d.inner,
        "max_position_embeddings": d.max_positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": d.q_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": d.kv_heads,
        "rms_norm_eps": d.rms_eps,
        "rope_scaling": _rope_scaling(d.rope),
        "rope_theta": d.rope.theta,
        "target_hidden_size": target.hidden,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": target.vocab,
    }


def _rope_scaling(rope: Rope) -> dict[str, Any]:
    return {
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_positions,
        "rope_type": "yarn",
        "truncate": rope.truncate,
    }
