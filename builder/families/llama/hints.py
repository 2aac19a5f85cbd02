"""Known ways in which a configuration and the tensors of these models do not belong together."""

from __future__ import annotations

import re

from specbuild.builder.checkpoint.hints import layer_hints
from specbuild.runtime.engine_dir.geometry import TargetGeometry

EXPERT = re.compile(r"\.mlp\.experts\.(\d{1,6})\.")
QUANTISED = (".qweight", ".weight_scale", ".weight_scale_inv", ".weight_packed", ".absmax")


def mismatch_hints(g: TargetGeometry, names: list[str]) -> list[str]:
    """What may explain that the tensors are not those of the geometry."""
    hints = layer_hints(g, names)
    normed = any(name.endswith("self_attn.q_norm.weight") for name in names)
    if normed and g.attention.qk_norm == "none":
        hints.append("the shards hold norms of queries and keys, which a llama has not; see qwen3")
    experts = {int(match[1]) for name in names if (match := EXPERT.search(name))}
    if experts and g.moe is not None and len(experts) != g.moe.experts:
        hints.append(f"the shards hold {len(experts)} experts, config.json says {g.moe.experts}")
    if not experts and g.moe is not None:
        hints.append("the shards hold no mlp.experts.*, but config.json describes experts")
    biased = any(name.endswith("self_attn.q_proj.bias") for name in names)
    if biased and not g.attention.qkv_bias:
        hints.append("the shards hold biases of attention, but attention_bias is not true")
    if any(name.endswith(QUANTISED) for name in names):
        hints.append("the shards hold quantised weights; build from the bf16 checkpoint")
    return hints
