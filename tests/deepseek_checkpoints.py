"""Writes small random DeepSeek-V3 checkpoints, by transformers' own model and writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# So few tokens that a random draft is right now and then.
LAYERS, HIDDEN, VOCAB = 2, 64, 32
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "max_position_embeddings": 512,
    "rms_norm_eps": 0.02,  # far from the latents' norms, which transformers leaves at 1e-6
    "rope_parameters": YARN,
}


def write_deepseek(path: Path, *, seed: int = 0, dtype: str = "float32", **changes: Any) -> None:
    """Write a random model of :data:`SIZES` and ``changes`` under ``path``."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM(DeepseekV3Config(**(SIZES | changes)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.2 * noise)
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * noise)
            else:
                tensor.copy_(1.2 * noise * tensor.shape[-1] ** -0.5)
    model.to(getattr(torch, dtype)).save_pretrained(path)
