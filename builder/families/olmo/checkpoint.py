"""Reads checkpoints of OLMo 2 and 3, and the keys of their GGUF files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.families.parts.grouped_config import (
    FULL,
    GROUPED_FIELDS,
    GROUPED_ONLY,
    WINDOWED,
    Defaults,
    dense_swiglu,
    every_layer,
    grouped_geometry,
    read_windows,
)
from specbuild.builder.families.parts.grouped_gguf import GroupedGguf, dense_fields, has_biases
from specbuild.runtime.engine_dir.geometry import AttentionParts, TargetGeometry

_ONLY = GROUPED_ONLY | {"clip_qkv": ()}
FIELDS = {
    "olmo2": FieldTable(read=GROUPED_FIELDS | {"attention_bias"}, only=_ONLY),
    "olmo3": FieldTable(
        read=GROUPED_FIELDS | {"attention_bias", "layer_types", "sliding_window"}, only=_ONLY
    ),
}
_DEFAULTS = {
    "olmo2": Defaults(eps=1e-5, kv_heads=0, rounding="after_weight"),
    "olmo3": Defaults(theta=5e5, eps=1e-5, kv_heads=0, rounding="after_weight", window_theta=0.0),
}
_FULL_ATTENTION_INTERVAL = 4  # in OLMo 3 one layer of this many has no window


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """Return the geometry and warnings.

    Raises SpecbuildError for unsupported or inconsistent values.
    """
    kind = config.text("model_type") or ""
    warnings = check_fields(config, FIELDS[kind], strict=strict)
    feed_forwards = every_layer(config, dense_swiglu(config))
    bias, windows = config.boolean("attention_bias", False), None
    if kind == "olmo3":
        windows = read_windows(config, len(feed_forwards), _default_types(len(feed_forwards)))
    geometry = grouped_geometry(
        path,
        config,
        AttentionParts(qkv_bias=bias, output_bias=bias, qk_norm="all_heads"),
        feed_forwards,
        defaults=_DEFAULTS[kind],
        windows=windows,
    )
    return replace(geometry, norm_places="outputs"), warnings


def _default_types(layers: int) -> list[str]:
    return [WINDOWED if (layer + 1) % _FULL_ATTENTION_INTERVAL else FULL for layer in range(layers)]


def _fields(keys: ModelKeys, model: GgufModel, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the fields; OLMo 3 also has windows, and a RoPE for each layer type."""
    fields = dense_fields(keys, model, shared) | {"attention_bias": has_biases(model)}
    name = "attention.sliding_window"
    if not keys.has(name):
        return fields
    layers, has_windows = shared["num_hidden_layers"], keys.switches(f"{name}_pattern")
    types = [WINDOWED if has_window else FULL for has_window in has_windows * layers]
    unscaled = {"rope_type": "default"}
    return fields | {
        "model_type": "olmo3",
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {
            kind: {"rope_theta": shared["rope_theta"], **(scaling or unscaled)}
            for kind, scaling in ((FULL, shared["rope_scaling"]), (WINDOWED, unscaled))
        },
        "layer_types": types[:layers] if has_windows else _default_types(layers),
        "sliding_window": keys.integer(name),
    }


FORMS = {
    "olmo2": GroupedGguf(
        "olmo2",
        names={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        own=_fields,
    ).form
}
