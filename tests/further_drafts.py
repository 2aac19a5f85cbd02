"""Write random EAGLE3 drafts with additional tensors: norms of heads, biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoint_files import edit_tensors
from checkpoints import write_draft

# By name: options of ``write_draft``, and additional tensors with their rows.
FURTHER: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "qwen3, tied, layers of the target": (
        {"draft_vocab": None, "own_embedding": True, "config_changes": {
            "model_type": "qwen3", "tie_word_embeddings": True, "num_hidden_layers": 36}},
        {"self_attn.q_norm.weight": 32, "self_attn.k_norm.weight": 32},
    ),
    "biases, 16 heads on a KV head": (
        {"q_heads": 16, "kv_heads": 1, "config_changes": {
            "attention_bias": True, "mlp_bias": True}},
        {"self_attn.q_proj.bias": 512, "self_attn.k_proj.bias": 32, "self_attn.v_proj.bias": 32,
         "self_attn.o_proj.bias": 64, "mlp.gate_proj.bias": 96, "mlp.up_proj.bias": 96,
         "mlp.down_proj.bias": 64},
    ),
    "llama3, biases of q, k and v": (
        {"rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}, "config_changes": {"qkv_bias": True}},
        {"self_attn.q_proj.bias": 128, "self_attn.k_proj.bias": 64, "self_attn.v_proj.bias": 64},
    ),
}  # fmt: skip


def write_further_draft(path: Path, name: str) -> None:
    """Write the draft that :data:`FURTHER` has under this name."""
    options, sizes = FURTHER[name]
    write_draft(path, **options)
    generator = torch.Generator().manual_seed(3)
    further = {
        f"midlayer.{tensor}": 0.3 * torch.randn(size, generator=generator) + ("norm" in tensor)
        for tensor, size in sizes.items()
    }
    edit_tensors(path, lambda tensors: tensors.update(further))
