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
# No file says which layers do not turn: llama.cpp takes every fourth.
FORMS = {"smollm3": GroupedGguf("smollm3", pairs=True).form}


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """The geometry, and warnings.

    Raises SpecbuildError for what is not implemented and for numbers that do not go together.
    """
    warnings = check_fields(config, FIELDS, strict=strict)
    feed_forwards = every_layer(config, dense_swiglu(config))
    layers, bias = len(feed_forwards), config.boolean("attention_bias", False)
    rotates = _rotates(config, layers)
    geometry = grouped_geometry(
        path,
        config,
        AttentionParts(qkv_bias=bias, output_bias=bias),
        feed_forwards,
        defaults=_DEFAULTS,
        windows=_windows(config, rotates),
    )
    unrotated = tuple(layer for layer in range(layers) if not rotates[layer])
    return replace(geometry, unrotated_layers=unrotated), warnings


def _rotates(config: Config, layers: int) -> list[bool]:
    """Whether each layer has RoPE: 1 in ``no_rope_layers`` says that it has."""
    listed = config.integers("no_rope_layers")
    if listed is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(listed) < layers or set(listed) - {0, 1}:
        raise config.wrong("no_rope_layers", f"0 or 1 for each of {layers} layers")
    return [entry == 1 for entry in listed[:layers]]


def _windows(config: Config, rotates: list[bool]) -> tuple[tuple[str, ...], int]:
    """Layer types and window: with ``use_sliding_window`` layers without RoPE may have one."""
    layers = len(rotates)
    if config.boolean("use_sliding_window", False):
        return read_windows(config, layers, [FULL if turns else WINDOWED for turns in rotates])
    if not {*config.texts("layer_types")} <= {FULL}:
        raise config.wrong("layer_types", f"{FULL} in every layer without use_sliding_window")
    return (FULL,) * layers, 0
