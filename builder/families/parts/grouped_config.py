"""Reads the geometry of a target with grouped-query attention from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from specbuild.builder.checkpoint.config_fields import TARGET_FIELDS
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.rope import (
    read_layer_ropes,
    read_positions,
    read_rope,
    rotated_width,
)
from specbuild.builder.checkpoint.target_parts import read_eos
from specbuild.runtime.engine_dir.feed_forward import (
    DenseFeedForward,
    FeedForward,
    MoeFeedForward,
    Swiglu,
    distinct_feed_forwards,
)
from specbuild.runtime.engine_dir.geometry import AttentionParts, Norm, Rope, TargetGeometry
from specbuild.runtime.engine_dir.rope_scaling import LongRopeScaling
from specbuild.runtime.errors import SpecbuildError

GROUPED_FIELDS = TARGET_FIELDS | {"head_dim", "intermediate_size"}
# The required values of every SwiGLU configuration without quantization.
GROUPED_ONLY: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
DEFAULT_THETA = 10000.0
PARTIAL = "partial_rotary_factor"
FULL, WINDOWED = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """The defaults of absent fields, equal to transformers' defaults of the model type.

    ``head_dim`` 0 is hidden size / heads. ``kv_heads`` 0 is the number of query heads, None is
    required. ``rope_fields`` are keys of the RoPE section that the family reads. ``window_theta``
    is the theta of layers with a window, 0 that of the others; with None all layers share one RoPE.
    """

    theta: float = DEFAULT_THETA
    eps: float = 1e-6
    head_dim: int = 0
    kv_heads: int | None = None
    tied: bool = False
    partial_rotary: float = 1.0
    rope_fields: frozenset[str] = frozenset()
    window_theta: float | None = None
    rounding: Literal["before_weight", "after_weight"] = "before_weight"


def grouped_geometry(
    path: Path,
    config: Config,
    attention: AttentionParts,
    feed_forwards: Sequence[FeedForward],
    *,
    defaults: Defaults,
    windows: tuple[tuple[str, ...], int] | None = None,
) -> TargetGeometry:
    """Return the checked geometry; ``feed_forwards`` are those of all layers.

    ``windows`` has the types of layers and their window; None means no windows. Raises
    SpecbuildError for a missing field and for inconsistent numbers.
    """
    layers, heads = len(feed_forwards), config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    head_dim = config.optional_integer("head_dim") or defaults.head_dim or hidden // heads
    rope, window_rope = _ropes(config, defaults, head_dim)
    kv_heads = heads if defaults.kv_heads == 0 else defaults.kv_heads
    layer_types, window = windows or ((FULL,) * layers, 0)
    distinct, layer_feed_forwards = distinct_feed_forwards(feed_forwards)
    geometry = TargetGeometry(
        model_type=config.text("model_type") or "",
        layers=layers,
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        q_heads=heads,
        kv_heads=config.integer("num_key_value_heads", kv_heads),
        head_dim=head_dim,
        attention=attention,
        norm=Norm(config.number("rms_norm_eps", defaults.eps), defaults.rounding),
        rope=rope,
        layer_types=layer_types,
        sliding_window=window if WINDOWED in layer_types else 0,
        feed_forwards=distinct,
        layer_feed_forwards=layer_feed_forwards,
        max_positions=read_positions(config, rope),
        tied_head=config.boolean("tie_word_embeddings", defaults.tied),
        eos_token_ids=read_eos((path,), config),
        window_rope=window_rope if WINDOWED in layer_types and window_rope != rope else None,
    )
    _check(config, geometry)
    _check_factors(config, geometry)
    return geometry


def _check_factors(config: Config, g: TargetGeometry) -> None:
    """Raise SpecbuildError if LongRoPE does not have a factor for each rotated pair."""
    for rope, width in ((g.rope, g.head_dim), (g.window_rope, g.head_dim)):
        scaling = None if rope is None else rope.scaling
        if rope is None or not isinstance(scaling, LongRopeScaling):
            continue
        pairs = (rope.width or width) // 2
        if len(scaling.short_factors) != pairs:
            raise config.wrong(
                "rope_scaling", f"{pairs} factors in short_factor and long_factor, one per pair"
            )


def _ropes(config: Config, defaults: Defaults, head_dim: int) -> tuple[Rope, Rope | None]:
    """Return the RoPE of all layers, or those of layers without and with a window."""
    if defaults.window_theta is not None:
        return read_layer_ropes(
            config, default_theta=defaults.theta, window_theta=defaults.window_theta
        )
    rope = read_rope(config, default_theta=defaults.theta, also=defaults.rope_fields)
    if PARTIAL in defaults.rope_fields:
        rope = replace(rope, width=rotated_width(config, head_dim, defaults.partial_rotary))
    return rope, None


def every_layer(config: Config, feed_forward: FeedForward) -> list[FeedForward]:
    """Return the same feed-forward for all layers."""
    return [feed_forward] * config.count("num_hidden_layers")


def dense_swiglu(config: Config) -> DenseFeedForward:
    """Return a SwiGLU of width ``intermediate_size``."""
    return DenseFeedForward(
        inner=config.integer("intermediate_size"),
        activation=Swiglu(),
        bias=config.boolean("mlp_bias", False),
    )


def read_windows(
    config: Config, layers: int, default_types: Sequence[str]
) -> tuple[tuple[str, ...], int]:
    """Return ``layer_types``, or the defaults, and ``sliding_window``, 0 without windows.

    Raises SpecbuildError for other types, a wrong number of them, and a missing window.
    """
    types = config.texts("layer_types") or tuple(default_types)
    if len(types) != layers or set(types) - {FULL, WINDOWED}:
        raise config.wrong("layer_types", f"{layers} of {FULL} or {WINDOWED}")
    return types, config.integer("sliding_window") if WINDOWED in types else 0


def _check(config: Config, g: TargetGeometry) -> None:
    problems = []
    if g.q_heads % g.kv_heads:
        problems.append(f"{g.q_heads} query heads are not a multiple of {g.kv_heads} KV heads")
    if g.head_dim % 2:
        problems.append(f"head_dim {g.head_dim} is odd, but rotary embedding needs pairs")
    moe = g.moe
    if moe is not None and moe.experts_per_token > moe.experts:
        problems.append(
            f"{moe.experts_per_token} experts per token, but only {moe.experts} experts"
        )
    if problems:
        raise SpecbuildError(f"{config.where}: {'; '.join(problems)}")


def routed_swiglu(
    config: Config, experts: str, inner: str, *, gating: str, **parts: Any
) -> MoeFeedForward:
    """Return SwiGLU experts with their number and width from these fields; ``parts`` adds more."""
    return MoeFeedForward(
        experts=config.count(experts),
        experts_per_token=config.count("num_experts_per_tok"),
        inner=config.integer(inner),
        storage="bf16",
        activation=Swiglu(),
        gating=gating,  # type: ignore[arg-type]
        **parts,
    )


def dense_inner(g: TargetGeometry) -> int:
    """Return the width of the feed-forward that all layers of a dense model share."""
    feed_forward = g.feed_forward(0)
    assert isinstance(feed_forward, DenseFeedForward)
    return feed_forward.inner
