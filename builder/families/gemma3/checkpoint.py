"""Reads checkpoints of Gemma 3's text model, and the keys of its GGUF files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.gguf.form import GgufForm
from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.checkpoint.source import SourceTensor, Tensors, remade
from specbuild.builder.families.parts.grouped_config import (
    FULL,
    GROUPED_FIELDS,
    WINDOWED,
    Defaults,
    every_layer,
    grouped_geometry,
    read_windows,
)
from specbuild.builder.families.parts.grouped_gguf import GroupedGguf, dense_fields
from specbuild.builder.families.parts.grouped_tensors import full_norm
from specbuild.runtime.engine_dir.feed_forward import DenseFeedForward, Geglu
from specbuild.runtime.engine_dir.geometry import AttentionParts, Multipliers, TargetGeometry

_ACTIVATION = "gelu_pytorch_tanh"
_PATTERN = "sliding_window_pattern"
FIELDS = FieldTable(
    read=GROUPED_FIELDS
    | {
        "layer_types",
        "query_pre_attn_scalar",
        "rope_local_base_freq",
        "sliding_window",
        _PATTERN,
        f"_{_PATTERN}",
    },
    only={
        "attention_bias": (False,),
        "attn_logit_softcapping": (),
        "final_logit_softcapping": (),
        "hidden_act": (_ACTIVATION,),
        "hidden_activation": (_ACTIVATION,),
        "use_bidirectional_attention": (False,),
    },
    inert=frozenset({"cache_implementation"}),
)
# The text sections of releases omit fields with transformers' default.
_FIELD_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "vocab_size": 262208,
}
_DEFAULTS = Defaults(theta=1e6, tied=True, rounding="after_weight")
_LOCAL_THETA = 10000.0
_FULL_ATTENTION_INTERVAL = 6  # one layer of this many has no window


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """Return the geometry and warnings.

    Raises SpecbuildError for unsupported or inconsistent values.
    """
    warnings = check_fields(config, FIELDS, strict=strict)
    config_fields = {name: value for name, value in config.fields.items() if value is not None}
    config = replace(config, fields=_FIELD_DEFAULTS | config_fields)
    mlp = DenseFeedForward(inner=config.integer("intermediate_size"), activation=Geglu())
    feed_forwards = every_layer(config, mlp)
    local = config.number("rope_local_base_freq", _LOCAL_THETA)
    geometry = grouped_geometry(
        path,
        config,
        AttentionParts(qk_norm="head", scale=config.number("query_pre_attn_scalar") ** -0.5),
        feed_forwards,
        defaults=replace(_DEFAULTS, window_theta=local),
        windows=_windows(config, len(feed_forwards)),
    )
    # Transformers rounds the factor to the weights' type, so it differs in bf16.
    multipliers = Multipliers(embedding=math.sqrt(geometry.hidden))
    return replace(geometry, norm_places="both", multipliers=multipliers), warnings


def engine_tensors(
    tensors: dict[str, SourceTensor], _geometry: TargetGeometry, _config: Config
) -> dict[str, SourceTensor]:
    """Convert audited tensors: checkpoints store norm weights minus 1, engines in full and fp32."""
    return {
        name: full_norm(tensor) if name.endswith("norm.weight") else tensor
        for name, tensor in tensors.items()
    }


def _windows(config: Config, layers: int) -> tuple[tuple[str, ...], int]:
    """Return layer types and window: each sixth layer has none."""
    every = config.integer(_PATTERN, config.integer(f"_{_PATTERN}", _FULL_ATTENTION_INTERVAL))
    types = [WINDOWED if (layer + 1) % every else FULL for layer in range(layers)]
    return read_windows(config, layers, types)


def _fields(keys: ModelKeys, model: GgufModel, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a file lacks: the local theta, the windows, and the scale."""
    layers, heads = shared["num_hidden_layers"], shared["num_attention_heads"]
    is_27b = layers == _27B_LAYERS
    return dense_fields(keys, model, shared) | {
        "hidden_act": None,
        "hidden_activation": _ACTIVATION,
        "query_pre_attn_scalar": shared["hidden_size"] // heads if is_27b else shared["head_dim"],
        "rope_local_base_freq": keys.number("rope.freq_base_swa", _LOCAL_THETA),
        "sliding_window": keys.integer("attention.sliding_window"),
    }


# Gemma 3 27B has another scale of scores; llama.cpp also recognizes it by its layers.
_27B_LAYERS = 62
_GGUF = GroupedGguf(
    "gemma3_text",
    names={
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    own=_fields,
)


def _gguf_tensors(model: GgufModel, config: dict[str, Any]) -> Tensors:
    """Return the tensors in Hugging Face's layout; GGUF files store norm weights in full."""
    return {
        name: remade(name, tensor, lambda weight: weight - 1.0)
        if name.endswith("norm.weight")
        else tensor
        for name, tensor in _GGUF.tensors(model, config).items()
    }


FORMS = {"gemma3": GgufForm(_GGUF.config, _gguf_tensors)}
