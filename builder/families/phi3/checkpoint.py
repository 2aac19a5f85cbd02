"""Reads checkpoints of Phi-3 and Phi-4, and the keys of their GGUF files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.checkpoint.gguf.rope import LONGROPE_FACTORS, longrope_fields
from specbuild.builder.checkpoint.source import SourceTensor, row_slices
from specbuild.builder.families.parts.grouped_config import (
    FULL,
    GROUPED_FIELDS,
    GROUPED_ONLY,
    PARTIAL,
    WINDOWED,
    Defaults,
    dense_inner,
    dense_swiglu,
    every_layer,
    grouped_geometry,
)
from specbuild.builder.families.parts.grouped_gguf import GroupedGguf, dense_fields
from specbuild.runtime.engine_dir.geometry import AttentionParts, TargetGeometry

FIELDS = FieldTable(
    read=GROUPED_FIELDS | {PARTIAL, "sliding_window"},
    only=GROUPED_ONLY | {"attention_bias": (False,)},
)
_DEFAULTS = Defaults(eps=1e-5, kv_heads=0, rope_fields=frozenset({PARTIAL}))
_FUSED = re.compile(r"(model\.layers\.\d+\.)(self_attn\.qkv|mlp\.gate_up)_proj\.weight")


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """Return the geometry and warnings.

    Raises SpecbuildError for unsupported or inconsistent values.
    """
    warnings = check_fields(config, FIELDS, strict=strict)
    feed_forwards = every_layer(config, dense_swiglu(config))
    window = config.optional_integer("sliding_window")
    types = (FULL if window is None else WINDOWED,) * len(feed_forwards)
    geometry = grouped_geometry(
        path,
        config,
        AttentionParts(),
        feed_forwards,
        defaults=_DEFAULTS,
        windows=(types, window or 0),
    )
    return geometry, warnings


def canonical_tensors(
    tensors: dict[str, SourceTensor], g: TargetGeometry, _config: Config
) -> tuple[dict[str, SourceTensor], tuple[str, ...]]:
    """Split fused projections; those with an unexpected number of rows stay, for the audit."""
    inner = dense_inner(g)
    parts = {
        "self_attn.qkv": {
            "self_attn.q": g.q_heads * g.head_dim,
            "self_attn.k": g.kv_heads * g.head_dim,
            "self_attn.v": g.kv_heads * g.head_dim,
        },
        "mlp.gate_up": {"mlp.gate": inner, "mlp.up": inner},
    }
    canonical: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        fused = _FUSED.fullmatch(name)
        counts = parts[fused[2]] if fused else {}
        if fused and tensor.shape[:1] == (sum(counts.values()),):
            names = {f"{fused[1]}{part}_proj.weight": n for part, n in counts.items()}
            canonical |= row_slices(tensor, names)
        else:
            canonical[name] = tensor
    return canonical, ()


def _fields(keys: ModelKeys, model: GgufModel, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the fields, with the window (0 means none) and LongRoPE's factors."""
    fields = dense_fields(keys, model, shared)
    window = keys.integer("attention.sliding_window", 0, least=0)
    fields["sliding_window"] = window or None
    if any(name in model.tensors for name in LONGROPE_FACTORS.values()):
        positions = shared["max_position_embeddings"]
        fields["rope_scaling"] = longrope_fields(keys, model.tensors, positions)
    return fields


FORMS = {
    "phi3": GroupedGguf(
        "phi3",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        own=_fields,
        partial=True,
    ).form
}
