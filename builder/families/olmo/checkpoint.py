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
_EVERY = 4  # a layer without a window in OLMo 3


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """The geometry, and warnings.

    Raises SpecbuildError for what is not implemented and for numbers that do not go together.
    """
    kind = config.text("model_type") or ""
    warnings = check_fields(config, FIELDS[kind], strict=strict)
    feed_forwards = every_layer(config, dense_swiglu(config))
    bias, windows = config.boolean("attention_bias", False), None
    if kind == "olmo3":
        windows = read_windows(config, len(feed_forwards), _types(len(feed_forwards)))
    geometry = grouped_geometry(
        path,
        config,
        AttentionParts(qkv_bias=bias, output_bias=bias, qk_norm="all_heads"),
        feed_forwards,
        defaults=_DEFAULTS[kind],
        windows=windows,
    )
    return replace(geometry, norm_places="outputs"), warnings


def _types(layers: int) -> list[str]:
    return [WINDOWED if (layer + 1) % _EVERY else FULL for layer in range(layers)]


def _fields(keys: ModelKeys, model: GgufModel, known: dict[str, Any]) -> dict[str, Any]:
    """OLMo 3 has a window, the layers that have it, and a RoPE for each kind of layer."""
    fields = dense_fields(keys, model, known) | {"attention_bias": has_biases(model)}
    name = "attention.sliding_window"
    if not keys.has(name):
        return fields
    layers, windowed = known["num_hidden_layers"], keys.switches(f"{name}_pattern")
    types = [WINDOWED if has_window else FULL for has_window in windowed * layers]
    plain = {"rope_type": "default"}
    return fields | {
        "model_type": "olmo3",
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {
            kind: {"rope_theta": known["rope_theta"], **(scaling or plain)}
            for kind, scaling in ((FULL, known["rope_scaling"]), (WINDOWED, plain))
        },
        "layer_types": types[:layers] if windowed else _types(layers),
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
