"""Write random assistants of Gemma 4 with transformers, for models of llama_checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from llama_checkpoints import HIDDEN, OF_KIND, SIZES, randomise

TYPES = ("sliding_attention", "sliding_attention", "full_attention")


def write_assistant(
    path: Path,
    kind: str = "gemma4_text",
    *,
    target: dict[str, Any] | None = None,
    clustered: bool = False,
    read_clusters: int = 3,
    dtype: str = "float32",
    sharpness: float = 1.0,
    **changes: Any,
) -> None:
    """Write an assistant for a model of this kind, with the changes ``target`` of its sizes.

    ``changes`` are those of the assistant's layers. A ``clustered`` head reads ``read_clusters`` of
    eight clusters. ``sharpness`` multiplies the scores of attention, whose errors levels amplify.
    """
    from transformers import (
        Gemma4AssistantConfig,
        Gemma4AssistantForCausalLM,
        Gemma4UnifiedAssistantConfig,
        Gemma4UnifiedAssistantForCausalLM,
    )

    layers: dict[str, Any] = {
        "model_type": kind, "hidden_size": 32, "intermediate_size": 80, "vocab_size": 32,
        "num_hidden_layers": len(TYPES), "layer_types": list(TYPES), "enable_moe_block": False,
        "num_kv_shared_layers": len(TYPES), "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False,
    }  # fmt: skip
    text = SIZES | OF_KIND[kind] | (target or {}) | layers | changes
    config, model = Gemma4AssistantConfig, Gemma4AssistantForCausalLM
    if kind == "gemma4_unified_text":
        config, model = Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM
    clusters = {"use_ordered_embeddings": clustered}
    if clustered:
        clusters |= {"num_centroids": 8, "centroid_intermediate_top_k": read_clusters}
    made = model(config(text_config=text, backbone_hidden_size=HIDDEN, **clusters))
    randomise(made, kind)
    for layer in made.model.layers:
        layer.self_attn.q_norm.weight.data *= sharpness
    if clustered:
        order = torch.randperm(32, generator=torch.Generator().manual_seed(7))
        made.masked_embedding.token_ordering.copy_(order)
    made.to(getattr(torch, dtype)).save_pretrained(path)
