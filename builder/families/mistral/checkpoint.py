"""Reads checkpoints of Mistral, Ministral 3 and Mixtral."""

from __future__ import annotations

from pathlib import Path

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.rope import NESTED
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.families.parts.grouped_config import (
    FULL,
    GROUPED_FIELDS,
    GROUPED_ONLY,
    WINDOWED,
    Defaults,
    dense_swiglu,
    every_layer,
    grouped_geometry,
    routed_swiglu,
)
from specbuild.builder.families.parts.grouped_tensors import BLOCK_SPARSE_NAMES, renamed_layers
from specbuild.runtime.engine_dir.feed_forward import FeedForward
from specbuild.runtime.engine_dir.geometry import AttentionParts, QueryGrowth, TargetGeometry

_DENSE = FieldTable(read=GROUPED_FIELDS | {"sliding_window"}, only=GROUPED_ONLY)
FIELDS = {
    "mistral": _DENSE,
    "ministral3": _DENSE,
    "mixtral": FieldTable(
        read=_DENSE.read | {"num_local_experts", "num_experts_per_tok"},
        only=GROUPED_ONLY,
        inert=frozenset({"router_jitter_noise"}),
    ),
}
_BETA = "llama_4_scaling_beta"
# Ministral 3 repeats the context length in its YaRN section.
_ROPE_FIELDS = frozenset({_BETA, "max_position_embeddings"})
_DEFAULTS = {
    "mistral": Defaults(kv_heads=8),
    "ministral3": Defaults(kv_heads=8, theta=1e6, eps=1e-5, rope_fields=_ROPE_FIELDS),
    "mixtral": Defaults(kv_heads=8, theta=1e6, eps=1e-5),
}


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """Return the geometry and warnings.

    Raises SpecbuildError for unsupported or inconsistent values.
    """
    kind = config.text("model_type") or ""
    warnings = check_fields(config, FIELDS[kind], strict=strict)
    has_growth = kind == "ministral3"
    geometry = grouped_geometry(
        path,
        config,
        AttentionParts(query_growth=_query_growth(config) if has_growth else None),
        every_layer(config, _feed_forward(config, kind)),
        defaults=_DEFAULTS[kind],
        windows=_windows(config),
    )
    return geometry, warnings


def canonical_tensors(
    tensors: dict[str, SourceTensor], _geometry: TargetGeometry, _config: Config
) -> tuple[dict[str, SourceTensor], tuple[str, ...]]:
    """Return the tensors, with Mixtral's experts under the names of other families."""
    return renamed_layers(tensors, BLOCK_SPARSE_NAMES), ()


def _feed_forward(config: Config, kind: str) -> FeedForward:
    if kind != "mixtral":
        return dense_swiglu(config)
    # The softmax of all, normalized over the chosen ones, equals the softmax of the chosen ones.
    return routed_swiglu(
        config, "num_local_experts", "intermediate_size", gating="softmax_selected"
    )


def _windows(config: Config) -> tuple[tuple[str, ...], int]:
    """Return layer types and window: every layer has the window, or none."""
    layers = config.count("num_hidden_layers")
    window = config.optional_integer("sliding_window")
    return (FULL if window is None else WINDOWED,) * layers, window or 0


def _query_growth(config: Config) -> QueryGrowth | None:
    """Return the factor of queries beyond the original context; None if beta is 0 (Devstral)."""
    nested = next((config.section(name) for name in NESTED if config.get(name) is not None), config)
    if nested.get(_BETA) in (None, 0):
        return None
    original = nested.integer("original_max_position_embeddings")
    return QueryGrowth(beta=nested.number(_BETA), original_max_positions=original)
