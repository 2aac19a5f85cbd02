"""GGUF files of Llama, Qwen2, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.families.parts.grouped_gguf import (
    Fields,
    GroupedGguf,
    dense_fields,
    has_biases,
)


def _llama(keys: ModelKeys, model: GgufModel, shared: Fields) -> Fields:
    """Return the fields of a Llama, or of a Mixtral, which has the same architecture."""
    experts = keys.parts("expert_count", 0)
    fields = dense_fields(keys, model, shared)
    if not experts:
        keys.has("expert_used_count")  # some converters write 0
        return fields | {"attention_bias": has_biases(model)}
    return fields | {
        "model_type": "mixtral",
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "num_local_experts": experts,
    }


def _with_biases(keys: ModelKeys, model: GgufModel, shared: Fields) -> Fields:
    return dense_fields(keys, model, shared) | {"attention_bias": has_biases(model)}


def _qwen3_moe(keys: ModelKeys, model: GgufModel, _shared: Fields) -> Fields:
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
    "qwen3": GroupedGguf("qwen3", own=_with_biases).form,
    "qwen3moe": GroupedGguf("qwen3_moe", own=_qwen3_moe).form,
}
