"""Reads configurations of Gemma 4's text part."""

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
_HEADS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
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
        *_HEADS.values(),
    },
    only={
        "attention_bias": (False,),
        "hidden_act": (ACTIVATION,),
        "hidden_activation": (ACTIVATION,),
        # Tokens of images see each other both ways; those of a text do not.
        "use_bidirectional_attention": ("vision",),
    },
)
# The text sections of releases leave out what has transformers' default.
_OMITTED: dict[str, Any] = {
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
_OMITTED_UNIFIED = {
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
}
_DEFAULTS = Defaults(theta=1e6, tied=True, rounding="after_weight", window_theta=1e4)
_EVERY = 6  # a layer without a window


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """The geometry, and warnings.

    Raises SpecbuildError for what is not implemented and for numbers that do not go together.
    """
    warnings = check_fields(config, FIELDS, strict=strict)
    unified = _OMITTED_UNIFIED if config.text("model_type") == UNIFIED else {}
    # Where a model has none, the field is null: no default stands for it.
    none = {"hidden_size_per_layer_input": 0} if _is_null(config) else {}
    stated = {name: value for name, value in config.fields.items() if value is not None}
    config = replace(config, fields=_OMITTED | unified | none | stated)
    layers = config.count("num_hidden_layers")
    types, window = _windows(config, layers)
    shared = config.integer("num_kv_shared_layers", 0, least=0)
    if shared and set(types) - set(types[: max(0, layers - shared)]):
        raise config.wrong("num_kv_shared_layers", "a layer of each type before those that share")
    local = WindowHeads(
        kv_heads=config.integer("num_key_value_heads"), head_dim=config.integer("head_dim")
    )
    same = config.boolean("attention_k_eq_v", False)
    heads = _full_heads(config, types, local, own=same)
    geometry = grouped_geometry(
        path,
        replace(config, fields=config.fields | heads),
        AttentionParts(qk_norm="head", scale=1.0, value_norm=True, keys_as_values=same),
        _feed_forwards(config, layers, shared),
        defaults=_DEFAULTS,
        windows=(types, window),
    )
    full = WindowHeads(kv_heads=geometry.kv_heads, head_dim=geometry.head_dim)
    cap = config.number("final_logit_softcapping", 0.0) if _capped(config) else 0.0
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


def _is_null(config: Config) -> bool:
    name = "hidden_size_per_layer_input"
    return name in config.fields and config.get(name) is None


def _capped(config: Config) -> bool:
    return config.get("final_logit_softcapping") is not None


def _windows(config: Config, layers: int) -> tuple[tuple[str, ...], int]:
    """Layer types and window; the last layer never has one."""
    usual = [WINDOWED if (layer + 1) % _EVERY else FULL for layer in range(layers)]
    types, window = read_windows(config, layers, [*usual[:-1], FULL])
    if types[-1] != FULL:
        raise config.wrong("layer_types", f"{FULL} as the last")
    return types, window


def _full_heads(
    config: Config, types: tuple[str, ...], local: WindowHeads, *, own: bool
) -> dict[str, int]:
    """Fields of KV heads and width of layers without a window, in either spelling.

    Their number of KV heads is theirs alone only where values are keys (``own``).
    """
    if config.get(_BY_LAYER) is None:
        kv_heads = config.optional_integer(_HEADS["num_key_value_heads"]) if own else None
        return {
            "head_dim": config.integer(_HEADS["head_dim"]),
            "num_key_value_heads": kv_heads or local.kv_heads,
        }
    by_layer = config.section(_BY_LAYER)
    full = [str(layer) for layer, kind in enumerate(types) if kind == FULL]
    found = [by_layer.section(layer) for layer in full]
    heads = {
        (
            section.integer("head_dim", local.head_dim),
            section.integer("num_key_value_heads", local.kv_heads),
        )
        for section in found
    }
    unknown = {name for section in found for name in section.fields} - set(_HEADS)
    if set(by_layer.fields) != set(full) or len(heads) != 1 or unknown:
        raise config.wrong(_BY_LAYER, f"the same {' and '.join(_HEADS)} for each {FULL} layer")
    ((head_dim, kv_heads),) = heads
    return {"head_dim": head_dim, "num_key_value_heads": kv_heads}


def _feed_forwards(config: Config, layers: int, shared: int) -> list[FeedForward]:
    """Those of all layers; layers that share caches may be twice as wide."""
    inner = config.integer("intermediate_size")
    wide = config.boolean("use_double_wide_mlp", False)
    moe = _experts(config) if config.boolean("enable_moe_block", False) else None
    found: list[FeedForward] = []
    for layer in range(layers):
        twice = wide and layer >= layers - shared
        dense = DenseFeedForward(inner=inner * (2 if twice else 1), activation=Geglu())
        both = moe and BothFeedForward(dense=dense, moe=moe, normed_apart=True)
        found.append(both or dense)
    return found


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
