"""DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash and Youtu, which GGUF calls one architecture."""

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
# Groups of experts, and how many of them a token takes, by (layers, experts): older files of these
# releases do not say.
_GROUPS = {(61, 256): (8, 4), (60, 160): (8, 3)}


def config(keys: ModelKeys, model: GgufModel) -> dict[str, Any]:
    """The fields of ``config.json``."""
    predictors = keys.parts("nextn_predict_layers", 0)
    layers = max(1, keys.parts("block_count") - predictors)
    heads = keys.integer("attention.head_count")
    rotated = keys.integer("rope.dimension_count")
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
        "qk_rope_head_dim": rotated,
        "attention_bias": False,
        **_head_widths(keys, rotated),
        **rope_fields(keys),
    }
    _name_stretch(keys, fields)
    if predictors:
        fields["num_nextn_predict_layers"] = predictors
    return fields | _feed_forward_fields(keys, model, fields)


def tensors(model: GgufModel, config: dict[str, Any]) -> Tensors:
    """The tensors in Hugging Face's layout."""
    found = by_layer(model.tensors)
    made = outer_tensors(found.outer)
    experts = config.get("n_routed_experts", 0)
    for layer, parts in found.layers.items():
        prefix = f"model.layers.{layer}."
        made |= taken_experts(parts, prefix, experts)
        made |= _up_projection(parts, prefix)
        made |= renamed(parts, prefix, _NAMES)
    return made


def _head_widths(keys: ModelKeys, rotated: int) -> dict[str, int]:
    """The widths of keys without their rotated part, and of values.

    Newer files have one latent head: the widths in the layers' own keys are a cache entry's.
    """
    entry, value = "attention.key_length", "attention.value_length"
    for name in (entry, value, "attention.head_count_kv"):
        keys.has(name)
    if keys.has(f"{entry}_mla"):
        entry, value = f"{entry}_mla", f"{value}_mla"
    width = keys.integer(entry)
    if width <= rotated:
        raise keys.fields.wrong(entry, f"more than rope.dimension_count, {rotated}")
    return {"qk_nope_head_dim": width - rotated, "v_head_dim": keys.integer(value)}


def _name_stretch(keys: ModelKeys, fields: dict[str, Any]) -> None:
    """The two factors of DeepSeek's YaRN, of which the file has a tenth of one."""
    scaling = fields["rope_scaling"]
    if scaling is None:
        keys.has("rope.scaling.yarn_log_multiplier")
    elif scaling["rope_type"] == "yarn" and keys.has("rope.scaling.yarn_log_multiplier"):
        name = "rope.scaling.yarn_log_multiplier"
        # Zero stands for no factor at all.
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
            keys.has(name)  # a model without experts may say what they would be
        return {"model_type": "youtu"}
    groups, chosen = _GROUPS.get((layers, experts), (1, 1))
    groups = keys.integer("expert_group_count", groups)
    chosen = keys.integer("expert_group_used_count", min(chosen, groups))
    kind = _kind(keys, layers, _vocabulary(model))
    return {
        **_KINDS[kind],
        "topk_method": _choice(kind, groups),
        "n_routed_experts": experts,
        "n_shared_experts": keys.integer("expert_shared_count", 0, least=0),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "first_k_dense_replace": dense,
        "n_group": groups,
        "topk_group": chosen,
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
    """Which of the models with experts this is, by how their scores are made of logits."""
    glm = layers in _GLM_LAYERS and vocabulary == _GLM_VOCAB
    scores = keys.integer("expert_gating_func", _SIGMOID if glm else _SOFTMAX)
    if scores not in (_SOFTMAX, _SIGMOID):
        raise keys.fields.wrong("expert_gating_func", f"{_SOFTMAX} or {_SIGMOID}")
    if scores == _SOFTMAX:
        return "v2"
    return "glm" if glm else "v3"


def _choice(kind: str, groups: int) -> str:
    if kind != "v2":
        return "noaux_tc"
    return "greedy" if groups == 1 else "group_limited_greedy"


def _vocabulary(model: GgufModel) -> int:
    embedding = model.tensors.get("token_embd.weight")
    return 0 if embedding is None else embedding.shape[0]


def _up_projection(parts: dict[str, GgufTensor], prefix: str) -> Tensors:
    """Takes out what newer files have apart: keys [h, rank, n] and values [h, v, rank]."""
    keys, values = parts.get("attn_k_b.weight"), parts.get("attn_v_b.weight")
    if keys is None or values is None:
        return {}
    if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[0] != values.shape[0]:
        return {}  # for the audit to report
    heads, rank, nope = keys.shape
    if values.shape[2] != rank:
        return {}
    del parts["attn_k_b.weight"], parts["attn_v_b.weight"]
    name = f"{prefix}self_attn.kv_b_proj.weight"
    shape = (heads * (nope + values.shape[1]), rank)
    return {name: made_of(name, [keys, values], shape, _joined)}


def _joined(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


FORM = GgufForm(config, tensors)
