"""GGUF files of DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash and Youtu: one architecture in GGUF."""

from __future__ import annotations

from typing import Any

import torch

from specbuild.builder.checkpoint.gguf.container import GgufTensor
from specbuild.builder.checkpoint.gguf.form import GgufForm
from specbuild.builder.checkpoint.gguf.layer_names import NAMES, taken_experts
from specbuild.builder.checkpoint.gguf.made import by_layer, made_of, outer_tensors, renamed
from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.checkpoint.gguf.rope import rope_fields
from specbuild.builder.checkpoint.source import Tensors

_NAMES = {
    **NAMES,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_SOFTMAX, _SIGMOID = 1, 2
_GLM_LAYERS, _GLM_VOCAB = (47, 48), 154880
# (layers, experts) → (groups of experts, groups of a token). Older files of these releases lack
# both numbers.
_GROUPS = {(61, 256): (8, 4), (60, 160): (8, 3)}


def config(keys: ModelKeys, model: GgufModel) -> dict[str, Any]:
    """Return the fields of ``config.json``."""
    predictors = keys.parts("nextn_predict_layers", 0)
    layers = max(1, keys.parts("block_count") - predictors)
    heads = keys.integer("attention.head_count")
    rope_dim = keys.integer("rope.dimension_count")
    fields = {
        "num_hidden_layers": layers,
        "hidden_size": keys.integer("embedding_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "intermediate_size": keys.integer("feed_forward_length"),
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "q_lora_rank": keys.integer("attention.q_lora_rank", 0, least=0) or None,
        "qk_rope_head_dim": rope_dim,
        "attention_bias": False,
        **_head_widths(keys, rope_dim),
        **rope_fields(keys),
    }
    _add_yarn_factors(keys, fields)
    if predictors:
        fields["num_nextn_predict_layers"] = predictors
    return fields | _feed_forward_fields(keys, model, fields)


def tensors(model: GgufModel, config: dict[str, Any]) -> Tensors:
    """Return the tensors in Hugging Face's layout."""
    grouped = by_layer(model.tensors)
    converted = outer_tensors(grouped.outer)
    experts = config.get("n_routed_experts", 0)
    for layer, parts in grouped.layers.items():
        prefix = f"model.layers.{layer}."
        converted |= taken_experts(parts, prefix, experts)
        converted |= _up_projection(parts, prefix)
        converted |= renamed(parts, prefix, _NAMES)
    return converted


def _head_widths(keys: ModelKeys, rope_dim: int) -> dict[str, int]:
    """Return the widths of keys without their rotary part, and of values.

    Newer files describe one latent head: their plain keys are the width of a cache entry.
    """
    entry, value = "attention.key_length", "attention.value_length"
    for name in (entry, value, "attention.head_count_kv"):
        keys.has(name)
    if keys.has(f"{entry}_mla"):
        entry, value = f"{entry}_mla", f"{value}_mla"
    width = keys.integer(entry)
    if width <= rope_dim:
        raise keys.fields.wrong(entry, f"more than rope.dimension_count, {rope_dim}")
    return {"qk_nope_head_dim": width - rope_dim, "v_head_dim": keys.integer(value)}


def _add_yarn_factors(keys: ModelKeys, fields: dict[str, Any]) -> None:
    """Add both factors of DeepSeek's YaRN to ``fields``; the file stores a tenth of one of them."""
    scaling = fields["rope_scaling"]
    if scaling is None:
        keys.has("rope.scaling.yarn_log_multiplier")
    elif scaling["rope_type"] == "yarn" and keys.has("rope.scaling.yarn_log_multiplier"):
        name = "rope.scaling.yarn_log_multiplier"
        # 0 means that the model has no factor.
        if keys.fields.get(name) != 0:
            mscale = round(10 * keys.number(name), 6)
            scaling |= {"mscale": mscale, "mscale_all_dim": mscale}


def _feed_forward_fields(
    keys: ModelKeys, model: GgufModel, fields: dict[str, Any]
) -> dict[str, Any]:
    layers = fields["num_hidden_layers"]
    experts = keys.parts("expert_count", 0)
    dense = keys.parts("leading_dense_block_count", 0)
    names = (
        "expert_used_count", "expert_shared_count", "expert_feed_forward_length",
        "expert_group_count", "expert_group_used_count", "expert_weights_scale",
        "expert_weights_norm", "expert_gating_func",
    )  # fmt: skip
    if not experts or dense >= layers:
        for name in names:
            keys.has(name)  # the keys may be there, but have no effect
        return {"model_type": "youtu"}
    groups, groups_chosen = _GROUPS.get((layers, experts), (1, 1))
    groups = keys.integer("expert_group_count", groups)
    groups_chosen = keys.integer("expert_group_used_count", min(groups_chosen, groups))
    kind = _kind(keys, layers, _vocabulary(model))
    return {
        **_KINDS[kind],
        "topk_method": _topk_method(kind, groups),
        "n_routed_experts": experts,
        "n_shared_experts": keys.integer("expert_shared_count", 0, least=0),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "first_k_dense_replace": dense,
        "n_group": groups,
        "topk_group": groups_chosen,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
    }


_KINDS: dict[str, dict[str, Any]] = {
    "v2": {
        "model_type": "deepseek_v2",
        "scoring_func": "softmax",
    },
    "v3": {
        "model_type": "deepseek_v3",
        "scoring_func": "sigmoid",
    },
    "glm": {
        "model_type": "glm4_moe_lite",
        "scoring_func": "sigmoid",
    },
}


def _kind(keys: ModelKeys, layers: int, vocabulary: int) -> str:
    """Return the key of ``_KINDS``, which follows from how a router computes scores."""
    glm = layers in _GLM_LAYERS and vocabulary == _GLM_VOCAB
    scores = keys.integer("expert_gating_func", _SIGMOID if glm else _SOFTMAX)
    if scores not in (_SOFTMAX, _SIGMOID):
        raise keys.fields.wrong("expert_gating_func", f"{_SOFTMAX} or {_SIGMOID}")
    if scores == _SOFTMAX:
        return "v2"
    return "glm" if glm else "v3"


def _topk_method(kind: str, groups: int) -> str:
    if kind != "v2":
        return "noaux_tc"
    return "greedy" if groups == 1 else "group_limited_greedy"


def _vocabulary(model: GgufModel) -> int:
    embedding = model.tensors.get("token_embd.weight")
    return 0 if embedding is None else embedding.shape[0]


def _up_projection(parts: dict[str, GgufTensor], prefix: str) -> Tensors:
    """Remove the two halves of the up-projection in newer files; return one joined tensor.

    The halves are keys [h, rank, n] and values [h, v, rank].
    """
    keys, values = parts.get("attn_k_b.weight"), parts.get("attn_v_b.weight")
    if keys is None or values is None:
        return {}
    if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[0] != values.shape[0]:
        return {}  # the audit reports the tensors
    heads, rank, nope = keys.shape
    if values.shape[2] != rank:
        return {}
    del parts["attn_k_b.weight"], parts["attn_v_b.weight"]
    name = f"{prefix}self_attn.kv_b_proj.weight"
    shape = (heads * (nope + values.shape[1]), rank)
    return {name: made_of(name, [keys, values], shape, _join_halves)}


def _join_halves(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


FORM = GgufForm(config, tensors)
