"""GGUF files of Gemma 4."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from specbuild.builder.checkpoint.gguf.container import GgufTensor
from specbuild.builder.checkpoint.gguf.form import GgufForm
from specbuild.builder.checkpoint.gguf.made import (
    as_it_is,
    by_layer,
    made_of,
    outer_tensors,
    renamed,
)
from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.checkpoint.gguf.rope import ROPE_FACTORS
from specbuild.builder.checkpoint.gguf.values import part, read_values
from specbuild.builder.checkpoint.source import Tensors
from specbuild.builder.families.gemma4.checkpoint import ACTIVATION
from specbuild.builder.families.parts.grouped_config import FULL, PARTIAL, WINDOWED

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_OUTER = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_STACKED = ("ffn_gate_up_exps.weight", "ffn_down_exps.weight")
# llama.cpp divides the frequencies of unrotated dimensions by a factor of at least this.
_MIN_UNROTATED_FACTOR = 1e29


def config_fields(keys: ModelKeys, model: GgufModel) -> dict[str, Any]:
    """Return the fields of ``config.json``; raises SpecbuildError for inconsistent keys."""
    inner = keys.integers("feed_forward_length")
    inputs = keys.integer("embedding_length_per_layer_input", 0, least=0)
    fields: dict[str, Any] = {
        "model_type": "gemma4_text",
        "hidden_size": keys.integer("embedding_length"),
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "num_kv_shared_layers": keys.integer("attention.shared_kv_layers", 0, least=0),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_activation": ACTIVATION,
        "hidden_size_per_layer_input": inputs,
        **_attention_fields(keys, model),
        **_expert_fields(keys),
    }
    if keys.has("final_logit_softcapping"):
        fields["final_logit_softcapping"] = keys.number("final_logit_softcapping")
    table = model.tensors.get("per_layer_token_embd.weight")
    if inputs and table is not None:
        fields["vocab_size_per_layer_input"] = table.shape[0]
    return fields


def _attention_fields(keys: ModelKeys, model: GgufModel) -> dict[str, Any]:
    """Return the fields of layers, their types, heads and rotary embeddings."""
    layers = keys.parts("block_count")
    has_windows = keys.switches("attention.sliding_window_pattern") or [True]
    has_windows = has_windows * layers if len(has_windows) == 1 else has_windows
    if len(has_windows) != layers:
        raise keys.fields.wrong("attention.sliding_window_pattern", f"{layers} switches")
    types = [WINDOWED if has_window else FULL for has_window in has_windows]
    kv_heads = _kv_heads_by_type(keys, types)
    head_dim = keys.integer("attention.key_length")
    local_dim = keys.integer("attention.key_length_swa", head_dim)
    for name, width in (
        ("attention.value_length", head_dim),
        ("attention.value_length_swa", local_dim),
        ("rope.dimension_count", head_dim),
        ("rope.dimension_count_swa", local_dim),
    ):
        keys.same(name, width)
    full = types.index(FULL) if FULL in types else 0
    rotary_share = _rotary_share(model.tensors.get(ROPE_FACTORS))
    thetas = keys.number("rope.freq_base", 1e6), keys.number("rope.freq_base_swa", 1e4)
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": keys.integer("attention.head_count"),
        "num_key_value_heads": kv_heads[WINDOWED],
        "num_global_key_value_heads": kv_heads[FULL],
        "head_dim": local_dim,
        "global_head_dim": head_dim,
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in model.tensors,
        "layer_types": types,
        "sliding_window": keys.integer("attention.sliding_window"),
        "rope_parameters": {
            FULL: {"rope_theta": thetas[0], "rope_type": "proportional", PARTIAL: rotary_share},
            WINDOWED: {"rope_theta": thetas[1], "rope_type": "default"},
        },
    }


def _expert_fields(keys: ModelKeys) -> dict[str, Any]:
    experts = keys.parts("expert_count", 0)
    if not experts:
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": experts,
        "top_k_experts": keys.parts("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
    }


def _kv_heads_by_type(keys: ModelKeys, types: list[str]) -> dict[str, int]:
    """Return the KV heads of each layer type; the key has one number, or one for each layer."""
    name = "attention.head_count_kv"
    numbers = keys.integers(name)
    by_layer = numbers * len(types) if len(numbers) == 1 else numbers
    by_type = dict(zip(types, by_layer, strict=False))
    if len(by_layer) != len(types) or any(
        by_type[kind] != number for kind, number in zip(types, by_layer, strict=True)
    ):
        raise keys.fields.wrong(name, f"one number for each type of {len(types)} layers")
    return {WINDOWED: by_type.get(WINDOWED, by_layer[0]), FULL: by_type.get(FULL, by_layer[0])}


def _rotary_share(factors: GgufTensor | None) -> float:
    """Return the share of rotated dimensions, from the factors of their frequencies."""
    if factors is None:
        return 1.0
    values = read_values(factors).double()
    return float((values < _MIN_UNROTATED_FACTOR).double().mean())


def gguf_tensors(model: GgufModel, config: dict[str, Any]) -> Tensors:
    """Return the tensors in Hugging Face's layout, with one tensor for each expert."""
    grouped = by_layer(model.tensors)
    outer = {name: tensor for name, tensor in grouped.outer.items() if name != ROPE_FACTORS}
    layer_inputs = {name: outer.pop(name) for name in [*outer] if name in _OUTER}
    converted = outer_tensors(outer) | {
        _OUTER[name]: as_it_is(_OUTER[name], tensor) for name, tensor in layer_inputs.items()
    }
    for layer, parts in grouped.layers.items():
        prefix = f"model.layers.{layer}."
        for name in _STACKED:
            stacked = parts.get(name)
            # The audit reports tensors of other shapes.
            if stacked is None or len(stacked.shape) != 3:
                continue
            if stacked.shape[0] == config.get("num_experts"):
                converted |= _split_stack(f"{prefix}experts.", name, parts.pop(name))
        converted |= renamed(parts, prefix, _NAMES)
    return converted


def _split_stack(prefix: str, name: str, stacked: GgufTensor) -> Tensors:
    """Return the matrices of every expert; gates precede ups in the first stack."""
    count, rows, width = stacked.shape
    if name == _STACKED[1]:
        cuts = {"down_proj": slice(0, rows)}
    else:
        cuts = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
    split: Tensors = {}
    for expert in range(count):
        for matrix, cut in cuts.items():
            tensor_name, height = f"{prefix}{expert}.{matrix}.weight", cut.stop - cut.start
            expert_tensor = part(stacked, expert)
            split[tensor_name] = made_of(
                tensor_name, [expert_tensor], (height, width), partial(_rows, cut=cut)
            )
    return split


def _rows(weight: torch.Tensor, *, cut: slice) -> torch.Tensor:
    return weight[cut]


FORMS = {"gemma4": GgufForm(config_fields, gguf_tensors)}
