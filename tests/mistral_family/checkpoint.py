"""Reads the configuration of a Mistral whose layers all have a window."""

from __future__ import annotations

from pathlib import Path

from specbuild.builder.checkpoint.config_fields import TARGET_FIELDS, FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.rope import read_rope
from specbuild.builder.checkpoint.target_parts import read_eos
from specbuild.runtime.engine_dir.geometry import (
    AttentionParts,
    DenseFeedForward,
    Norm,
    Swiglu,
    TargetGeometry,
)

FIELDS = FieldTable(
    read=TARGET_FIELDS | {"head_dim", "intermediate_size", "sliding_window"},
    only={"hidden_act": ("silu",)},
)


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """The geometry, and warnings."""
    layers, heads = config.integer("num_hidden_layers"), config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    mlp = DenseFeedForward(inner=config.integer("intermediate_size"), activation=Swiglu())
    geometry = TargetGeometry(
        model_type="mistral",
        layers=layers,
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        q_heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.optional_integer("head_dim") or hidden // heads,
        attention=AttentionParts(),
        norm=Norm(config.number("rms_norm_eps", 1e-6), "before_weight"),
        rope=read_rope(config, default_theta=10000.0),
        layer_types=("sliding_attention",) * layers,
        sliding_window=config.integer("sliding_window"),
        feed_forwards=(mlp,),
        layer_feed_forwards=(0,) * layers,
        max_positions=config.integer("max_position_embeddings"),
        tied_head=config.boolean("tie_word_embeddings", False),
        eos_token_ids=read_eos((path,), config),
    )
    return geometry, check_fields(config, FIELDS, strict=strict)
