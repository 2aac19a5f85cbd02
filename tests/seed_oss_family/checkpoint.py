"""Reads the configuration of a Seed-OSS."""

from __future__ import annotations

from pathlib import Path

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.families.parts.grouped_config import (
    GROUPED_FIELDS,
    GROUPED_ONLY,
    Defaults,
    dense_swiglu,
    every_layer,
    grouped_geometry,
)
from specbuild.runtime.engine_dir.geometry import AttentionParts, TargetGeometry

FIELDS = FieldTable(
    read=GROUPED_FIELDS | {"attention_bias", "attention_out_bias", "mlp_bias"},
    only=GROUPED_ONLY,
    inert=frozenset({"attention_dropout", "residual_dropout"}),
)


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """The geometry, and warnings."""
    warnings = check_fields(config, FIELDS, strict=strict)
    attention = AttentionParts(
        qkv_bias=config.boolean("attention_bias", True),
        output_bias=config.boolean("attention_out_bias", False),
    )
    layers = every_layer(config, dense_swiglu(config))
    defaults = Defaults(head_dim=128)
    return grouped_geometry(path, config, attention, layers, defaults=defaults), warnings
