"""Llama, Qwen2, Qwen3 and Qwen3-MoE as GGUF files have them."""

from __future__ import annotations

from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.families.parts.grouped_gguf import (
    Fields,
    GroupedGguf,
    dense_fields,
    has_biases,
)


def _llama(keys: ModelKeys, model: GgufModel, known: Fields) -> Fields:
    """Those of a Llama, or of what else has this architecture: Mixtral, with experts."""
    experts = keys.parts("expert_count", 0)
    fields = dense_fields(keys, model, known)
    if not experts:
        keys.has("expert_used_count")  # zero, where a conversion notes it down
        return fields | {"attention_bias": has_biases(model)}
    return fields | {
        "model_type": "mixtral",
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "num_local_experts": experts,
    }


def _biased(keys: ModelKeys, model: GgufModel, known: Fields) -> Fields:
    return dense_fields(keys, model, known) | {"attention_bias": has_biases(model)}


def _qwen3_moe(keys: ModelKeys, model: GgufModel, _known: Fields) -> Fields:
    return {
        "attention_bias": has_biases(model),
        "decoder_sparse_step": 1,
        "intermediate_size": keys.integer("feed_forward_length", 1),
        "mlp_only_layers": [],
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "num_experts": keys.parts("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


FORMS = {
    "llama": GroupedGguf("llama", pairs=True, own=_llama).form,
    "qwen2": GroupedGguf("qwen2").form,
    "qwen3": GroupedGguf("qwen3", own=_biased).form,
    "qwen3moe": GroupedGguf("qwen3_moe", own=_qwen3_moe).form,
}
