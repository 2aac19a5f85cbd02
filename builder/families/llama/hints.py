"""Hints for checkpoints whose config does not match the tensors of these models."""

from __future__ import annotations

import re

from specbuild.builder.checkpoint.hints import layer_hints
from specbuild.runtime.engine_dir.geometry import TargetGeometry

EXPERT = re.compile(r"\.mlp\.experts\.(\d{1,6})\.")
QUANTIZED_SUFFIXES = (".qweight", ".weight_scale", ".weight_scale_inv", ".weight_packed", ".absmax")


def mismatch_hints(g: TargetGeometry, names: list[str]) -> list[str]:
    """Return hints why the tensors do not match the geometry."""
    hints = layer_hints(g, names)
    has_qk_norms = any(name.endswith("self_attn.q_norm.weight") for name in names)
    if has_qk_norms and g.attention.qk_norm == "none":
        hints.append(
            "the shards hold norms of queries and keys, but a llama has none; check whether "
            "model_type must be qwen3"
        )
    experts = {int(match[1]) for name in names if (match := EXPERT.search(name))}
    if experts and g.moe is not None and len(experts) != g.moe.experts:
        hints.append(f"the shards hold {len(experts)} experts, config.json says {g.moe.experts}")
    if not experts and g.moe is not None:
        hints.append("the shards hold no mlp.experts.*, but config.json describes experts")
    has_biases = any(name.endswith("self_attn.q_proj.bias") for name in names)
    if has_biases and not g.attention.qkv_bias:
        hints.append("the shards hold biases of attention, but attention_bias is not true")
    if any(name.endswith(QUANTIZED_SUFFIXES) for name in names):
        hints.append("the shards hold quantized weights; build from the bf16 checkpoint")
    return hints
