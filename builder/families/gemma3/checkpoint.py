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
# The text sections of releases leave out what has transformers' default.
_OMITTED = {
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
_EVERY = 6  # a layer without a window


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """The geometry, and warnings.

    Raises SpecbuildError for what is not implemented and for numbers that do not go together.
    """
    warnings = check_fields(config, FIELDS, strict=strict)
    stated = {name: value for name, value in config.fields.items() if value is not None}
    config = replace(config, fields=_OMITTED | stated)
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
    # Transformers rounds the factor to the weights' type: in bf16 that is another one.
    scaled = Multipliers(embedding=math.sqrt(geometry.hidden))
    return replace(geometry, norm_places="both", multipliers=scaled), warnings


def engine_tensors(
    tensors: dict[str, SourceTensor], _geometry: TargetGeometry, _config: Config
) -> dict[str, SourceTensor]:
    """Audited tensors; weights of norms are stored less 1, and engines have them whole, in fp32."""
    return {
        name: full_norm(tensor) if name.endswith("norm.weight") else tensor
        for name, tensor in tensors.items()
    }


def _windows(config: Config, layers: int) -> tuple[tuple[str, ...], int]:
    """Layer types and window: each sixth layer has none."""
    every = config.integer(_PATTERN, config.integer(f"_{_PATTERN}", _EVERY))
    types = [WINDOWED if (layer + 1) % every else FULL for layer in range(layers)]
    return read_windows(config, layers, types)


def _fields(keys: ModelKeys, model: GgufModel, known: dict[str, Any]) -> dict[str, Any]:
    """A file has neither the local theta, nor the pattern, nor the scale of scores."""
    layers, heads = known["num_hidden_layers"], known["num_attention_heads"]
    large = layers == _LARGEST_LAYERS
    return dense_fields(keys, model, known) | {
        "hidden_act": None,
        "hidden_activation": _ACTIVATION,
        "query_pre_attn_scalar": known["hidden_size"] // heads if large else known["head_dim"],
        "rope_local_base_freq": keys.number("rope.freq_base_swa", _LOCAL_THETA),
        "sliding_window": keys.integer("attention.sliding_window"),
    }


# Of Gemma 3 27B, whose scores have a scale of their own; llama.cpp knows it by its layers too.
_LARGEST_LAYERS = 62
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
    """The tensors in Hugging Face's layout: files have the weights of norms whole."""
    return {
        name: remade(name, tensor, lambda weight: weight - 1.0)
        if name.endswith("norm.weight")
        else tensor
        for name, tensor in _GGUF.tensors(model, config).items()
    }


FORMS = {"gemma3": GgufForm(_GGUF.config, _gguf_tensors)}
