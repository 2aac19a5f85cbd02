"""Reads checkpoints of Llama, Qwen2, Qwen3, Qwen3-MoE, MiMo and Qwen3-VL's text model."""

from __future__ import annotations

from pathlib import Path

from specbuild.builder.checkpoint.config_fields import check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.families.llama.config_fields import FIELDS
from specbuild.builder.families.parts.grouped_config import (
    FULL,
    WINDOWED,
    Defaults,
    dense_swiglu,
    every_layer,
    grouped_geometry,
    read_windows,
    routed_swiglu,
)
from specbuild.runtime.engine_dir.feed_forward import FeedForward, MoeFeedForward
from specbuild.runtime.engine_dir.geometry import AttentionParts, TargetGeometry

# Older versions of transformers stored this table, which also follows from config.json.
ROTARY_TABLE = ".rotary_emb.inv_freq"
# All sections of Qwen3-VL's RoPE have the same position in text, so they have no effect.
_SECTIONS = frozenset({"mrope_interleaved", "mrope_section"})
_DEFAULTS = {
    "llama": Defaults(kv_heads=0),
    "qwen3": Defaults(head_dim=128),
    "qwen3_vl_text": Defaults(theta=5e5, head_dim=128, rope_fields=_SECTIONS),
}


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """Return the geometry and warnings.

    Raises SpecbuildError for unsupported or inconsistent values.
    """
    kind = config.text("model_type") or ""
    warnings = check_fields(config, FIELDS[kind], strict=strict)
    feed_forwards = _feed_forwards(config)
    geometry = grouped_geometry(
        path,
        config,
        _attention(kind, config),
        feed_forwards,
        defaults=_DEFAULTS.get(kind, Defaults()),
        windows=_windows(config, len(feed_forwards)),
    )
    return geometry, warnings


def without_tables(
    tensors: dict[str, SourceTensor], _geometry: TargetGeometry, _config: Config
) -> tuple[dict[str, SourceTensor], tuple[str, ...]]:
    """Return the tensors without rotary tables, and a warning if there are any."""
    remaining = {name: t for name, t in tensors.items() if not name.endswith(ROTARY_TABLE)}
    if len(remaining) == len(tensors):
        return remaining, ()
    return remaining, (
        f"target: {len(tensors) - len(remaining)} tensors *{ROTARY_TABLE} are ignored; the build "
        "computes them from config.json",
    )


def _windows(config: Config, layers: int) -> tuple[tuple[str, ...], int]:
    """Return layer types and window; ``use_sliding_window`` affects Qwen's last layers."""
    if config.boolean("use_sliding_window", False):
        full = config.integer("max_window_layers", 28, least=0)
        types = [WINDOWED if layer >= full else FULL for layer in range(layers)]
        return read_windows(config, layers, types)
    if not {*config.texts("layer_types")} <= {FULL}:
        raise config.wrong("layer_types", f"{FULL} in every layer without use_sliding_window")
    return (FULL,) * layers, 0


def _attention(kind: str, config: Config) -> AttentionParts:
    """Return the attention: biases are optional in Llama and Qwen3, fixed in Qwen2 and MiMo."""
    if kind in ("qwen2", "mimo"):
        return AttentionParts(qkv_bias=True)
    bias = config.boolean("attention_bias", False)
    return AttentionParts(
        qkv_bias=bias, output_bias=bias, qk_norm="none" if kind == "llama" else "head"
    )


def _feed_forwards(config: Config) -> list[FeedForward]:
    """Return the feed-forwards: each ``decoder_sparse_step``-th has experts, with exceptions."""
    if config.get("model_type") != "qwen3_moe":
        return every_layer(config, dense_swiglu(config))
    layers, step = config.count("num_hidden_layers"), config.integer("decoder_sparse_step", 1)
    dense = config.integers("mlp_only_layers") or ()
    routed = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    return [_experts(config) if has_experts else dense_swiglu(config) for has_experts in routed]


def _experts(config: Config) -> MoeFeedForward:
    names = [name for name in ("num_experts", "num_local_experts") if config.get(name) is not None]
    counts: set[int] = {config.count(name) for name in names or ["num_experts"]}
    if len(counts) > 1:
        raise config.wrong("num_experts", f"num_local_experts, {config.get('num_local_experts')}")
    # The softmax of all, normalized over the chosen ones, equals the softmax of the chosen ones.
    is_normalized = config.boolean("norm_topk_prob", False)
    return routed_swiglu(
        config,
        names[0] if names else "num_experts",
        "moe_intermediate_size",
        gating="softmax_selected" if is_normalized else "softmax_topk",
    )
