"""Reads checkpoints of SmolLM3, and the keys of its GGUF files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
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
from specbuild.builder.families.parts.grouped_gguf import GroupedGguf
from specbuild.runtime.engine_dir.geometry import AttentionParts, TargetGeometry

FIELDS = FieldTable(
    read=GROUPED_FIELDS
    | {
        "attention_bias",
        "layer_types",
        "mlp_bias",
        "no_rope_layer_interval",
        "no_rope_layers",
        "sliding_window",
        "use_sliding_window",
    },
    only=GROUPED_ONLY,
    inert=frozenset({"max_window_layers"}),
)
_DEFAULTS = Defaults(theta=2e6, kv_heads=4, tied=True)
# GGUF files do not say which layers lack RoPE: llama.cpp assumes every fourth.
FORMS = {"smollm3": GroupedGguf("smollm3", pairs=True).form}


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """Return the geometry and warnings.

    Raises SpecbuildError for unsupported or inconsistent values.
    """
    warnings = check_fields(config, FIELDS, strict=strict)
    feed_forwards = every_layer(config, dense_swiglu(config))
    layers, bias = len(feed_forwards), config.boolean("attention_bias", False)
    has_rope = _rotary_layers(config, layers)
    geometry = grouped_geometry(
        path,
        config,
        AttentionParts(qkv_bias=bias, output_bias=bias),
        feed_forwards,
        defaults=_DEFAULTS,
        windows=_windows(config, has_rope),
    )
    unrotated = tuple(layer for layer in range(layers) if not has_rope[layer])
    return replace(geometry, unrotated_layers=unrotated), warnings


def _rotary_layers(config: Config, layers: int) -> list[bool]:
    """Return whether each layer has RoPE; a 1 in ``no_rope_layers`` means that it has."""
    flags = config.integers("no_rope_layers")
    if flags is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(flags) < layers or set(flags) - {0, 1}:
        raise config.wrong("no_rope_layers", f"0 or 1 for each of {layers} layers")
    return [entry == 1 for entry in flags[:layers]]


def _windows(config: Config, has_rope: list[bool]) -> tuple[tuple[str, ...], int]:
    """Return layer types and window; only layers without RoPE may have one."""
    layers = len(has_rope)
    if config.boolean("use_sliding_window", False):
        return read_windows(config, layers, [FULL if rotates else WINDOWED for rotates in has_rope])
    if not {*config.texts("layer_types")} <= {FULL}:
        raise config.wrong("layer_types", f"{FULL} in every layer without use_sliding_window")
    return (FULL,) * layers, 0
