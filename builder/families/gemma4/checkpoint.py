"""Reads configs of Gemma 4's text model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.families.parts.grouped_config import (
    FULL,
    GROUPED_FIELDS,
    PARTIAL,
    WINDOWED,
    Defaults,
    grouped_geometry,
    read_windows,
)
from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    FeedForward,
    Geglu,
    MoeFeedForward,
)
from specbuild.runtime.engine_dir.geometry import (
    AttentionParts,
    LayerInputs,
    Multipliers,
    TargetGeometry,
    WindowHeads,
)

ACTIVATION = "gelu_pytorch_tanh"
UNIFIED = "gemma4_unified_text"
_BY_LAYER = "per_layer_config"
_FULL_HEADS_FIELDS = {
    "head_dim": "global_head_dim",
    "num_key_value_heads": "num_global_key_value_heads",
}
FIELDS = FieldTable(
    read=GROUPED_FIELDS
    | {
        "attention_k_eq_v",
        "enable_moe_block",
        "final_logit_softcapping",
        "hidden_size_per_layer_input",
        "layer_types",
        "moe_intermediate_size",
        "num_experts",
        "num_kv_shared_layers",
        "sliding_window",
        "top_k_experts",
        "use_double_wide_mlp",
        "vocab_size_per_layer_input",
        _BY_LAYER,
        *_FULL_HEADS_FIELDS.values(),
    },
    only={
        "attention_bias": (False,),
        "hidden_act": (ACTIVATION,),
        "hidden_activation": (ACTIVATION,),
        # Only image tokens attend in both directions.
        "use_bidirectional_attention": ("vision",),
    },
)
# The text sections of releases omit fields with transformers' default.
_FIELD_DEFAULTS: dict[str, Any] = {
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_size": 2304,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 9216,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 30,
    "num_key_value_heads": 4,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, PARTIAL: 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "sliding_window": 512,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
_UNIFIED_DEFAULTS = {
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
}
_DEFAULTS = Defaults(theta=1e6, tied=True, rounding="after_weight", window_theta=1e4)
_FULL_ATTENTION_INTERVAL = 6  # one layer of this many has no window


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """Return the geometry and warnings.

    Raises SpecbuildError for unsupported or inconsistent values.
    """
    warnings = check_fields(config, FIELDS, strict=strict)
    unified = _UNIFIED_DEFAULTS if config.text("model_type") == UNIFIED else {}
    # A null field means that the model has no such inputs, so the default must not apply.
    without_inputs = {"hidden_size_per_layer_input": 0} if _has_null_inputs(config) else {}
    config_fields = {name: value for name, value in config.fields.items() if value is not None}
    config = replace(config, fields=_FIELD_DEFAULTS | unified | without_inputs | config_fields)
    layers = config.count("num_hidden_layers")
    types, window = _windows(config, layers)
    shared = config.integer("num_kv_shared_layers", 0, least=0)
    if shared and set(types) - set(types[: max(0, layers - shared)]):
        raise config.wrong(
            "num_kv_shared_layers", "a layer of each type before the layers that share caches"
        )
    local = WindowHeads(
        kv_heads=config.integer("num_key_value_heads"), head_dim=config.integer("head_dim")
    )
    keys_as_values = config.boolean("attention_k_eq_v", False)
    heads = _full_heads(config, types, local, own_kv_heads=keys_as_values)
    geometry = grouped_geometry(
        path,
        replace(config, fields=config.fields | heads),
        AttentionParts(qk_norm="head", scale=1.0, value_norm=True, keys_as_values=keys_as_values),
        _feed_forwards(config, layers, shared),
        defaults=_DEFAULTS,
        windows=(types, window),
    )
    full = WindowHeads(kv_heads=geometry.kv_heads, head_dim=geometry.head_dim)
    cap = config.number("final_logit_softcapping", 0.0) if _has_logits_cap(config) else 0.0
    width = config.integer("hidden_size_per_layer_input", least=0)
    return replace(
        geometry,
        norm_places="both",
        multipliers=Multipliers(embedding=math.sqrt(geometry.hidden), logits_cap=cap),
        window_heads=local if WINDOWED in types and local != full else None,
        shared_caches=shared,
        layer_inputs=LayerInputs(width=width, vocab=config.integer("vocab_size_per_layer_input"))
        if width
        else None,
        layer_scale=True,
    ), warnings


def _has_null_inputs(config: Config) -> bool:
    name = "hidden_size_per_layer_input"
    return name in config.fields and config.get(name) is None


def _has_logits_cap(config: Config) -> bool:
    return config.get("final_logit_softcapping") is not None


def _windows(config: Config, layers: int) -> tuple[tuple[str, ...], int]:
    """Return layer types and window; the last layer never has one."""
    default_types = [
        WINDOWED if (layer + 1) % _FULL_ATTENTION_INTERVAL else FULL for layer in range(layers)
    ]
    types, window = read_windows(config, layers, [*default_types[:-1], FULL])
    if types[-1] != FULL:
        raise config.wrong("layer_types", f"{FULL} as the last type")
    return types, window


def _full_heads(
    config: Config, types: tuple[str, ...], local: WindowHeads, *, own_kv_heads: bool
) -> dict[str, int]:
    """Return the fields for width and KV heads of layers without a window, from either section.

    Their number of KV heads may differ only with ``own_kv_heads``.
    """
    if config.get(_BY_LAYER) is None:
        kv_heads = (
            config.optional_integer(_FULL_HEADS_FIELDS["num_key_value_heads"])
            if own_kv_heads
            else None
        )
        return {
            "head_dim": config.integer(_FULL_HEADS_FIELDS["head_dim"]),
            "num_key_value_heads": kv_heads or local.kv_heads,
        }
    by_layer = config.section(_BY_LAYER)
    full = [str(layer) for layer, kind in enumerate(types) if kind == FULL]
    sections = [by_layer.section(layer) for layer in full]
    heads = {
        (
            section.integer("head_dim", local.head_dim),
            section.integer("num_key_value_heads", local.kv_heads),
        )
        for section in sections
    }
    unknown = {name for section in sections for name in section.fields} - set(_FULL_HEADS_FIELDS)
    if set(by_layer.fields) != set(full) or len(heads) != 1 or unknown:
        raise config.wrong(
            _BY_LAYER, f"the same {' and '.join(_FULL_HEADS_FIELDS)} for each {FULL} layer"
        )
    ((head_dim, kv_heads),) = heads
    return {"head_dim": head_dim, "num_key_value_heads": kv_heads}


def _feed_forwards(config: Config, layers: int, shared: int) -> list[FeedForward]:
    """Return every layer's feed-forward; layers that share caches may be twice as wide."""
    inner = config.integer("intermediate_size")
    has_wide_layers = config.boolean("use_double_wide_mlp", False)
    moe = _experts(config) if config.boolean("enable_moe_block", False) else None
    feed_forwards: list[FeedForward] = []
    for layer in range(layers):
        is_wide = has_wide_layers and layer >= layers - shared
        dense = DenseFeedForward(inner=inner * (2 if is_wide else 1), activation=Geglu())
        both = moe and BothFeedForward(dense=dense, moe=moe, normed_apart=True)
        feed_forwards.append(both or dense)
    return feed_forwards


def _experts(config: Config) -> MoeFeedForward:
    return MoeFeedForward(
        experts=config.count("num_experts"),
        experts_per_token=config.count("top_k_experts"),
        inner=config.integer("moe_intermediate_size"),
        storage="bf16",
        activation=Geglu(),
        gating="softmax_selected",
        expert_scale=True,
    )
