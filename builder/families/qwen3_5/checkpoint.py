"""Reads checkpoints of Qwen3.5, Qwen3.5-MoE and Qwen3-Next.

Qwen3.6 and Qwen3.8 have the same configs as Qwen3.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from specbuild.builder.checkpoint.audit import ExpectedTensor
from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, Tensors, remade
from specbuild.builder.families.parts.experts import split_experts
from specbuild.builder.families.parts.grouped_config import (
    FULL,
    GROUPED_FIELDS,
    GROUPED_ONLY,
    PARTIAL,
    Defaults,
    dense_swiglu,
    every_layer,
    grouped_geometry,
    routed_swiglu,
)
from specbuild.builder.families.parts.grouped_tensors import (
    full_norm,
    grouped_for_engine,
    grouped_tensors,
)
from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    FeedForward,
    Swiglu,
    routed_part,
)
from specbuild.runtime.engine_dir.geometry import (
    LINEAR_ATTENTION,
    AttentionParts,
    GatedDelta,
    TargetGeometry,
)

DENSE, MOE, NEXT = "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"
# All sections of the RoPE have the same position in text, so they have no effect.
_SECTIONS = frozenset({"mrope_interleaved", "mrope_section"})
_EXPERTS = frozenset(
    {
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "shared_expert_intermediate_size",
    }
)
_COMMON = FieldTable(
    read=GROUPED_FIELDS
    | {
        PARTIAL,
        "attention_bias",
        "full_attention_interval",
        "layer_types",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "mtp_num_hidden_layers",
        "num_nextn_predict_layers",
    },
    only=GROUPED_ONLY
    | {
        "attention_bias": (False,),
        "attn_output_gate": (True,),
        "mamba_ssm_dtype": ("float32",),
        "mtp_use_dedicated_embeddings": (False,),
    },
    # Some versions of transformers write this for every model with linear attention.
    inert=frozenset({"mlp_only_layers"}),
)
FIELDS = {
    DENSE: _COMMON,
    MOE: replace(_COMMON, read=_COMMON.read | _EXPERTS),
    NEXT: replace(
        _COMMON,
        read=_COMMON.read | _EXPERTS | {"decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"},
        inert=frozenset(),
    ),
}
_DEFAULTS = Defaults(
    head_dim=256,
    partial_rotary=0.25,
    rope_fields=_SECTIONS | {PARTIAL},
    rounding="after_weight",
)
# Qwen3-Next's projections, and the projections of Qwen3.5 that they contain.
_BY_KEY_HEAD = {"in_proj_qkvz": ("qkv", "z"), "in_proj_ba": ("b", "a")}
_FULL_ATTENTION_INTERVAL = 4  # one layer of this many has keys and values


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """Return the geometry and warnings.

    Raises SpecbuildError for unsupported or inconsistent values.
    """
    kind = config.text("model_type") or ""
    warnings = check_fields(config, FIELDS[kind], strict=strict)
    feed_forwards = _feed_forwards(kind, config)
    geometry = grouped_geometry(
        path,
        config,
        AttentionParts(qk_norm="head", output_gate=True),
        feed_forwards,
        defaults=_DEFAULTS,
        windows=(_layer_types(config, len(feed_forwards)), 0),
    )
    return replace(geometry, gated_delta=_delta(config, geometry)), warnings


def _layer_types(config: Config, layers: int) -> tuple[str, ...]:
    """Return the config's layer types; by default each fourth layer has keys and values."""
    every = config.count("full_attention_interval", _FULL_ATTENTION_INTERVAL)
    types = config.texts("layer_types") or tuple(
        LINEAR_ATTENTION if (layer + 1) % every else FULL for layer in range(layers)
    )
    if len(types) != layers or set(types) - {LINEAR_ATTENTION, FULL}:
        raise config.wrong("layer_types", f"{layers} of {LINEAR_ATTENTION} or {FULL}")
    if FULL not in types:
        raise config.wrong("layer_types", f"at least one {FULL} layer")
    return types


def _delta(config: Config, g: TargetGeometry) -> GatedDelta | None:
    if not g.linear_layers:
        return None
    delta = GatedDelta(
        key_heads=config.count("linear_num_key_heads", 16),
        value_heads=config.count("linear_num_value_heads", 32),
        key_width=config.integer("linear_key_head_dim", 128),
        value_width=config.integer("linear_value_head_dim", 128),
        taps=config.count("linear_conv_kernel_dim", 4, least=2),
    )
    if delta.value_heads % delta.key_heads:
        raise config.wrong("linear_num_value_heads", f"a multiple of {delta.key_heads} key heads")
    return delta


def _feed_forwards(kind: str, config: Config) -> list[FeedForward]:
    """Return every layer's feed-forward; Qwen3-Next may mix dense ones and experts."""
    if kind == DENSE:
        return every_layer(config, dense_swiglu(config))
    experts = _experts(config)
    if kind == MOE:
        return every_layer(config, experts)
    layers, step = config.count("num_hidden_layers"), config.integer("decoder_sparse_step", 1)
    dense = config.integers("mlp_only_layers") or ()
    return [
        experts if layer not in dense and (layer + 1) % step == 0 else dense_swiglu(config)
        for layer in range(layers)
    ]


def _experts(config: Config) -> BothFeedForward:
    """Return routed experts, and a gated shared one."""
    # The softmax of all, normalized over the chosen ones, equals the softmax of the chosen ones.
    is_normalized = config.boolean("norm_topk_prob", True)
    moe = routed_swiglu(
        config,
        "num_experts",
        "moe_intermediate_size",
        gating="softmax_selected" if is_normalized else "softmax_topk",
    )
    inner = config.integer("shared_expert_intermediate_size")
    return BothFeedForward(
        dense=DenseFeedForward(inner=inner, activation=Swiglu()), moe=moe, gated=True
    )


def checkpoint_tensors(g: TargetGeometry) -> dict[str, ExpectedTensor]:
    """Return the checkpoint's tensors; Qwen3-Next's projections are grouped by key head."""
    expected = grouped_tensors(g)
    delta = g.gated_delta
    if g.model_type != NEXT or delta is None:
        return expected
    for layer in g.linear_layers:
        prefix = f"model.layers.{layer}.linear_attn."
        for fused, parts in _BY_KEY_HEAD.items():
            parts_expected = [expected.pop(f"{prefix}in_proj_{part}.weight") for part in parts]
            shape = (sum(part.shape[0] for part in parts_expected), g.hidden)
            expected[f"{prefix}{fused}.weight"] = ExpectedTensor(shape, FLOAT_DTYPES)
    return expected


def canonical_tensors(
    tensors: Tensors, g: TargetGeometry, _config: Config
) -> tuple[Tensors, tuple[str, ...]]:
    """Return one tensor for each expert; releases store those of a layer in one."""
    canonical = dict(tensors)
    for layer in range(g.layers):
        moe = routed_part(g.feed_forward(layer))
        if moe is not None:
            split_experts(canonical, f"model.layers.{layer}.mlp.experts.", moe)
    return canonical, ()


def _split_by_key_head(tensors: Tensors, prefix: str, delta: GatedDelta) -> None:
    """Split Qwen3-Next's projections into Qwen3.5's."""
    heads, shared = delta.key_heads, delta.value_heads // delta.key_heads
    values = shared * delta.value_width
    sizes = {
        "in_proj_qkvz": {"q": delta.key_width, "k": delta.key_width, "v": values, "z": values},
        "in_proj_ba": {"b": shared, "a": shared},
    }
    for name, parts in _BY_KEY_HEAD.items():
        fused = tensors.pop(f"{prefix}{name}.weight")
        for part in parts:
            split_name = f"{prefix}in_proj_{part}.weight"
            tensors[split_name] = remade(split_name, fused, _row_reader(part, heads, sizes[name]))


def _row_reader(
    parts: str, heads: int, sizes: dict[str, int]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that reads the rows of these parts, one part after the other."""

    def read_rows(weight: torch.Tensor) -> torch.Tensor:
        split = weight.unflatten(0, (heads, -1)).split(list(sizes.values()), dim=1)
        by_part = dict(zip(sizes, split, strict=True))
        return torch.cat([by_part[part].flatten(0, 1) for part in parts])

    return read_rows


def engine_tensors(tensors: Tensors, g: TargetGeometry, config: Config) -> Tensors:
    """Convert audited tensors to the engine's layout.

    Checkpoints store norm weights minus 1, except those after linear attention.
    """
    converted = dict(tensors)
    if g.model_type == NEXT and g.gated_delta is not None:
        for layer in g.linear_layers:
            _split_by_key_head(converted, f"model.layers.{layer}.linear_attn.", g.gated_delta)
    return {
        name: full_norm(tensor) if is_stored_less_1(name) else tensor
        for name, tensor in grouped_for_engine(converted, g, config).items()
    }


def is_stored_less_1(name: str) -> bool:
    """Return whether checkpoints store a tensor minus 1, as the weights of most norms."""
    return name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
