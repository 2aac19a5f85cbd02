"""The metadata keys in GGUF files of small models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf_models
from checkpoints import write_target
from gguf_files import Stored, tokenizer_keys, write_gguf
from gguf_models import gpt_oss_twin
from llama_checkpoints import write_llama
from tokenizers import Tokenizer

TEMPLATE = "{{ messages[0].content }}"
GPT_OSS_KEYS: dict[str, Any] = {
    ".block_count": 2,
    ".context_length": 512,
    ".embedding_length": 256,
    ".feed_forward_length": 64,
    ".attention.head_count": 4,
    ".attention.head_count_kv": 2,
    ".attention.key_length": 32,
    ".attention.value_length": 32,
    ".attention.layer_norm_rms_epsilon": 1e-5,
    ".attention.sliding_window": 8,
    ".rope.freq_base": 150000.0,
    ".rope.scaling.type": "yarn",
    ".rope.scaling.factor": 4.0,
    ".rope.scaling.original_context_length": 128,
    ".expert_count": 4,
    ".expert_used_count": 2,
    ".expert_feed_forward_length": 64,
}
DEEPSEEK_KEYS: dict[str, Any] = {
    ".block_count": 2,
    ".context_length": 512,
    ".embedding_length": 64,
    ".vocab_size": 32,
    ".feed_forward_length": 96,
    ".leading_dense_block_count": 1,
    ".attention.head_count": 4,
    ".attention.layer_norm_rms_epsilon": 0.02,
    ".attention.q_lora_rank": 24,
    ".attention.kv_lora_rank": 32,
    ".rope.dimension_count": 16,
    ".rope.freq_base": 10000.0,
    ".rope.scaling.type": "yarn",
    ".rope.scaling.factor": 4.0,
    ".rope.scaling.original_context_length": 128,
    ".rope.scaling.yarn_log_multiplier": 0.08,
    ".expert_count": 8,
    ".expert_used_count": 3,
    ".expert_shared_count": 2,
    ".expert_feed_forward_length": 24,
    ".expert_group_count": 4,
    ".expert_group_used_count": 2,
    ".expert_weights_scale": 2.5,
    ".expert_weights_norm": True,
    ".expert_gating_func": 2,
}
APART = {
    ".attention.head_count_kv": 1,
    ".attention.key_length": 48,
    ".attention.value_length": 32,
    ".attention.key_length_mla": 40,
    ".attention.value_length_mla": 20,
}
TOGETHER = {
    ".attention.head_count_kv": 4,
    ".attention.key_length": 40,
    ".attention.value_length": 20,
}

_DELTA_KEYS: dict[str, Any] = {
    ".block_count": 4, ".attention.key_length": 16, ".attention.value_length": 16,
    ".rope.dimension_count": 4, ".rope.freq_base": 1e4, ".full_attention_interval": 4,
    ".ssm.conv_kernel": 4, ".ssm.state_size": 8, ".ssm.group_count": 2,
    ".ssm.time_step_rank": 4, ".ssm.inner_size": 32,
}  # fmt: skip
LLAMA_KEYS: dict[str, Any] = {
    ".block_count": 3,
    ".context_length": 512,
    ".embedding_length": 64,
    ".feed_forward_length": 96,
    ".vocab_size": 32,
    ".attention.head_count": 4,
    ".attention.head_count_kv": 2,
    ".attention.layer_norm_rms_epsilon": 0.02,
    ".rope.freq_base": 10000.0,
}
# By model type: the architecture, and the keys that only it has.
LLAMA_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {".rope.dimension_count": 16}),
    "qwen3": ("qwen3", {".attention.key_length": 24, ".attention.value_length": 24}),
    "qwen3_moe": (
        "qwen3moe",
        {
            ".attention.key_length": 16, ".attention.value_length": 16, ".expert_count": 8,
            ".expert_used_count": 3, ".expert_feed_forward_length": 24,
        },
    ),
    "qwen2": ("qwen2", {}),
    "smollm3": ("smollm3", {
        ".block_count": 4, ".rope.dimension_count": 16, ".rope.freq_base": 2e6,
    }),
    "phi3": ("phi3", {
        ".rope.dimension_count": 16, ".attention.sliding_window": 0,
        ".rope.scaling.original_context_length": 4096,
    }),
    "olmo2": ("olmo2", {".rope.dimension_count": 16}),
    "olmo3": ("olmo2", {
        ".block_count": 4, ".attention.sliding_window": 12,
        ".attention.sliding_window_pattern": [True, True, True, False],
        ".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0,
        ".rope.scaling.original_context_length": 32,
    }),
    "gemma3_text": ("gemma3", {
        ".block_count": 6, ".attention.key_length": 16, ".attention.value_length": 16,
        ".attention.sliding_window": 12, ".rope.freq_base": 1e6,
    }),
    "glm4_moe": ("glm4moe", {
        ".attention.key_length": 16, ".attention.value_length": 16, ".rope.dimension_count": 8,
        ".expert_count": 8, ".expert_used_count": 3, ".expert_shared_count": 1,
        ".expert_feed_forward_length": 24, ".expert_gating_func": 2, ".expert_weights_scale": 1.5,
        ".expert_weights_norm": True, ".leading_dense_block_count": 1,
        ".nextn_predict_layers": 0,
    }),
    "qwen3_5_text": ("qwen35", {
        **_DELTA_KEYS, ".rope.dimension_sections": [1, 1, 0, 0],
    }),
    "qwen3_5_moe_text": ("qwen35moe", {
        **_DELTA_KEYS, ".expert_count": 8, ".expert_used_count": 3,
        ".expert_feed_forward_length": 24, ".expert_shared_feed_forward_length": 40,
    }),
    "qwen3_next": ("qwen3next", {
        **_DELTA_KEYS, ".ssm.time_step_rank": 6, ".ssm.inner_size": 48, ".expert_count": 8,
        ".expert_used_count": 3, ".expert_feed_forward_length": 24,
        ".expert_shared_feed_forward_length": 40,
    }),
    "minimax_m2": ("minimax-m2", {
        ".attention.key_length": 16, ".attention.value_length": 16, ".rope.dimension_count": 8,
        ".expert_count": 8, ".expert_used_count": 3, ".expert_feed_forward_length": 24,
        ".feed_forward_length": 24, ".expert_gating_func": 2,
    }),
    "granite": ("granite", {
        ".rope.dimension_count": 16, ".attention.scale": 0.2, ".embedding_scale": 3.0,
        ".logit_scale": 0.7, ".residual_scale": 0.4,
    }),
    "mixtral": (
        "llama",
        {
            ".rope.dimension_count": 16, ".rope.freq_base": 1e6, ".expert_count": 8,
            ".expert_used_count": 3, ".feed_forward_length": 24,
        },
    ),
    "ministral3": (
        "mistral3",
        {
            ".rope.dimension_count": 16, ".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0,
            ".rope.scaling.original_context_length": 24, ".rope.scaling.yarn_beta_fast": 32.0,
            ".rope.scaling.yarn_beta_slow": 1.0, ".rope.scaling.yarn_log_multiplier": 1.0,
            ".attention.temperature_scale": 0.3,
        },
    ),
}  # fmt: skip


def write_gpt_oss(folder: Path, **options: Any) -> tuple[Path, dict[str, Any], dict[str, Stored]]:
    model = folder / "model"
    write_target(
        model, layers=2, hidden=256, head_dim=32, inner=64, vocab=320, tokenizer=True,
        chat_template=TEMPLATE, eos=(0, 1, 2), rope_spelling="rope_scaling", **options,
    )  # fmt: skip
    text = Tokenizer.from_file(str(model / "tokenizer.json"))
    keys = GPT_OSS_KEYS | tokenizer_keys(text, "gpt-4o") | {"tokenizer.chat_template": TEMPLATE}
    return model, keys | {"tokenizer.ggml.eos_token_id": 0}, gpt_oss_twin(model)


def write_gguf_llama(folder: Path, kind: str, values: str = "", **sizes: int) -> Path:
    """Write a random Llama with matrices of this GGUF type, except for the embedding.

    Values and down projections have the type ``values``, if given. ``sizes`` are those of its
    config.json, such as hidden_size, intermediate_size, head_dim and num_attention_heads.
    """
    write_llama(folder / "model", rope_parameters=None, **sizes)
    config = json.loads((folder / "model" / "config.json").read_text())
    architecture, keys = LLAMA_KINDS["llama"]
    keys = LLAMA_KEYS | keys | {
        ".embedding_length": config["hidden_size"],
        ".feed_forward_length": config["intermediate_size"],
        ".rope.dimension_count": config["head_dim"],
        ".attention.head_count": config["num_attention_heads"],
        ".attention.head_count_kv": config["num_key_value_heads"],
    }  # fmt: skip

    def kinds(name: str, shape: tuple[int, ...]) -> str:
        if len(shape) != 2 or "embed_tokens" in name:
            return "F32"
        return values if values and ("v_proj" in name or "down_proj" in name) else kind

    with patch.object(gguf_models, "mixed", kinds):
        tensors = gguf_models.llama_twin(folder / "model", config)
    return write_gguf(folder / "model.gguf", architecture, keys, tensors)


def write_gguf_experts(folder: Path, gate_up: str, down: str, **sizes: int) -> Path:
    """Write a random Qwen3 whose experts have these GGUF types, and other matrices F32.

    ``folder / "model"`` has the same numbers in safetensors. ``sizes`` are those of its
    config.json.
    """
    write_llama(folder / "model", "qwen3_moe", rope_parameters=None, **sizes)
    config = json.loads((folder / "model" / "config.json").read_text())
    architecture, keys = LLAMA_KINDS["qwen3_moe"]
    keys = LLAMA_KEYS | keys | {
        ".block_count": config["num_hidden_layers"],
        ".embedding_length": config["hidden_size"],
        ".feed_forward_length": config["intermediate_size"],
        ".attention.head_count": config["num_attention_heads"],
        ".attention.head_count_kv": config["num_key_value_heads"],
        ".attention.key_length": config["head_dim"],
        ".attention.value_length": config["head_dim"],
        ".expert_count": sizes["num_experts"],
        ".expert_used_count": sizes["num_experts_per_tok"],
        ".expert_feed_forward_length": config["moe_intermediate_size"],
    }  # fmt: skip

    def kind(name: str, shape: tuple[int, ...]) -> str:
        if "exps" not in name:
            return "F32"
        return down if "down" in name else gate_up

    with patch.object(gguf_models, "mixed", kind):
        tensors = gguf_models.llama_twin(folder / "model", config)
    return write_gguf(folder / "model.gguf", architecture, keys, tensors)
