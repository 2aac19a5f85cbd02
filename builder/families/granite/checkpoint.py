"""Reads checkpoints of Granite, and the keys of its GGUF files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.families.parts.grouped_config import (
    GROUPED_FIELDS,
    GROUPED_ONLY,
    Defaults,
    dense_swiglu,
    every_layer,
    grouped_geometry,
)
from specbuild.builder.families.parts.grouped_gguf import GroupedGguf, dense_fields, has_biases
from specbuild.runtime.engine_dir.geometry import AttentionParts, Multipliers, TargetGeometry

# The fields of a config and the keys of a GGUF file.
_FACTORS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "logits_scaling": "logit_scale",
    "residual_multiplier": "residual_scale",
}
FIELDS = FieldTable(
    read=GROUPED_FIELDS | {"attention_bias", "mlp_bias", *_FACTORS}, only=GROUPED_ONLY
)


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """Return the geometry and warnings.

    Raises SpecbuildError for unsupported or inconsistent values.
    """
    warnings = check_fields(config, FIELDS, strict=strict)
    bias = config.boolean("attention_bias", False)
    attention = AttentionParts(
        qkv_bias=bias, output_bias=bias, scale=config.number("attention_multiplier", 1.0)
    )
    layers = every_layer(config, dense_swiglu(config))
    geometry = grouped_geometry(path, config, attention, layers, defaults=Defaults(kv_heads=0))
    multipliers = Multipliers(
        embedding=config.number("embedding_multiplier", 1.0),
        residual=config.number("residual_multiplier", 1.0),
        logits_divisor=config.number("logits_scaling", 1.0),
    )
    return replace(geometry, multipliers=multipliers), warnings


def _fields(keys: ModelKeys, model: GgufModel, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the factors; a file omits a factor of 0, which means 1."""
    factors = {name: keys.number(key, 1.0) for name, key in _FACTORS.items()}
    return dense_fields(keys, model, shared) | {"attention_bias": has_biases(model), **factors}


FORMS = {"granite": GroupedGguf("granite", pairs=True, own=_fields).form}
