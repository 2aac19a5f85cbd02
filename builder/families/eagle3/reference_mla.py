"""The attention of a draft with MLA: the module of transformers with wider inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


class ReferenceMla:
    """The attention of one layer, with ``weights`` fp32 by their names within ``self_attn``."""

    def __init__(self, decoder: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

        rope = dict(decoder.get("rope_parameters") or decoder.get("rope_scaling") or {})
        rope.setdefault("rope_theta", decoder.get("rope_theta") or 10000.0)
        rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
        config = DeepseekV3Config(
            **{name: decoder.get(name) for name in _SIZES},
            num_key_value_heads=decoder["num_attention_heads"],
            max_position_embeddings=decoder.get("max_position_embeddings") or 2048,
            rope_interleave=decoder.get("rope_interleave", True),
            rope_parameters=rope,
            attn_implementation="eager",
        )
        self.attention: Any = modeling.DeepseekV3Attention(config, 0)
        for name in ("q_proj", "q_a_proj", "kv_a_proj_with_mqa"):
            if getattr(self.attention, name, None) is not None:
                rows, inputs = weights[f"{name}.weight"].shape
                setattr(self.attention, name, nn.Linear(inputs, rows, bias=False))
        self.attention.load_state_dict(weights)
        self.attention.float().eval().requires_grad_(False)
        self.rotary: Any = modeling.DeepseekV3RotaryEmbedding(config)

    @torch.no_grad()
    def run(self, u: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Causal attention of rows ``u`` [T, width] at ``positions`` [T] → [T, H]."""
        causal_mask = torch.full((len(u), len(u)), -torch.inf).triu(1)[None, None]
        attended, *_ = self.attention(
            hidden_states=u[None],
            position_embeddings=self.rotary(u[None], positions[None]),
            attention_mask=causal_mask,
        )
        return attended[0]
