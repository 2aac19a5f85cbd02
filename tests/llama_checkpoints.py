"""Write small random models of Llama and similar families with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# A small vocabulary, so that tokens of a random draft are sometimes accepted.
LAYERS, HIDDEN, VOCAB = 3, 64, 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 0.02,
    "eos_token_id": 1,
}
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_DELTA_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 40,
}
OF_KIND: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "qwen3_vl_text": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "mistral": {"head_dim": 24, "sliding_window": None},
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "max_position_embeddings": 96,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "mixtral": {
        "intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": None,
    },
    "smollm3": {"num_hidden_layers": 4, "pad_token_id": None},
    "phi3": {"pad_token_id": None},
    "olmo2": {},
    "olmo3": {
        "sliding_window": 12,
        "num_hidden_layers": 4,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "gemma3_text": {
        "head_dim": 16,
        "num_hidden_layers": 6,
        "sliding_window": 12,
        "query_pre_attn_scalar": 16,
        "pad_token_id": None,
        "bos_token_id": 0,
    },
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 12,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 3.0,
        "pad_token_id": None,
        "bos_token_id": 0,
    },
    "gemma4_unified_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_hidden_layers": 4,
        "sliding_window": 12,
        "pad_token_id": None,
        "bos_token_id": 0,
    },
    "glm4_moe": {
        "head_dim": 16,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
        "num_mtp_layers": 0,
        "pad_token_id": None,
    },
    "minimax_m2": {
        "head_dim": 16,
        "intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "bos_token_id": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "qwen3_5_text": _DELTA
    | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    },
    "qwen3_5_moe_text": _DELTA | _DELTA_EXPERTS,
    "qwen3_next": _DELTA | _DELTA_EXPERTS | {"linear_num_value_heads": 6},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.7,
        "residual_multiplier": 0.4,
    },
}


def write_llama(
    path: Path, kind: str = "llama", *, dtype: str = "float32", shards: int = 1, **changes: Any
) -> None:
    """Write a random model of :data:`SIZES` and ``changes`` under ``path``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = SIZES | OF_KIND[kind] | changes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    randomise(model, kind)
    model.to(getattr(torch, dtype))
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    model.save_pretrained(path, max_shard_size=size // shards + 1)


def randomise(model: torch.nn.Module, kind: str) -> None:
    """Set random weights, scaled so that the logits differ clearly."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                less_1 = kind.startswith(("gemma3", "qwen3_5", "qwen3_next"))
                whole = not less_1 or name.endswith("linear_attn.norm.weight")
                tensor.copy_(whole + 0.2 * noise)
            elif name.endswith(("layernorm_1.weight", "layernorm_2.weight", "scale", "scalar")):
                tensor.copy_(1 + 0.2 * noise)
            elif name.endswith("A_log"):
                tensor.copy_(noise)
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * noise)
            elif name.endswith("bias"):
                tensor.copy_(0.2 * noise)
            else:
                tensor.copy_(1.3 * noise * tensor.shape[-1] ** -0.5)
