"""Rotary frequencies of transformers, for drafts in plain torch."""

from __future__ import annotations

from typing import Any

import torch


def rotary_frequencies(decoder: dict[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    """Return inverse frequencies [D/2] and attention factor, computed by transformers."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = dict(decoder.get("rope_parameters") or decoder.get("rope_scaling") or {})
    rope.setdefault("rope_theta", decoder.get("rope_theta") or 10000.0)
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=decoder.get("max_position_embeddings") or 2048,
        rope_parameters=rope,
    )
    if rope["rope_type"] == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, None)
