"""Checks of a target's geometry that its types cannot express."""

from __future__ import annotations

import math

from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    FeedForward,
    MoeFeedForward,
)
from specbuild.runtime.engine_dir.geometry import Norm, Rope, TargetGeometry
from specbuild.runtime.engine_dir.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    LongRopeScaling,
    ProportionalScaling,
)
from specbuild.runtime.errors import EngineFileError

_LARGEST = 2**31 - 1
_SIZES = ("layers", "hidden", "vocab", "q_heads", "kv_heads", "head_dim", "max_positions")


def check_target(g: TargetGeometry) -> None:
    """Raise EngineFileError for the first inconsistency."""
    for name in _SIZES:
        _require("target", name, getattr(g, name))
    _require("target", "sliding_window", g.sliding_window, minimum=0)
    if len(g.layer_types) != g.layers:
        raise EngineFileError(f"target has {g.layers} layers, but {len(g.layer_types)} layer_types")
    if len(g.latent_dims) not in (0, g.layers) or min(g.latent_dims, default=0) < 0:
        raise EngineFileError(
            f"target.latent_dims are {g.latent_dims}, expected none or {g.layers} of 0 or above"
        )
    if any(not 0 <= token < g.vocab for token in g.eos_token_ids):
        raise EngineFileError(
            f"target.eos_token_ids are {g.eos_token_ids}, expected ids below the vocabulary's "
            f"{g.vocab}"
        )
    _check_norm("target.norm", g.norm)
    _check_rope("target.rope", g.rope)
    if g.mla is not None:
        for name in ("kv_lora_rank", "rope_dim", "nope_dim", "v_dim"):
            _require("target.mla", name, getattr(g.mla, name))
        _check_norm("target.mla.norm", g.mla.norm)
    if g.indexer is not None and not all(0 <= i < g.layers for i in g.indexer.layers):
        raise EngineFileError(
            f"target.indexer.layers are {g.indexer.layers}, expected some of {g.layers} layers"
        )
    _check_attention(g)
    _check_linear(g)
    _check_feed_forwards(g)


def _check_attention(g: TargetGeometry) -> None:
    """Check the rotary embeddings, and the factors of queries."""
    if not all(0 <= layer < g.layers for layer in g.unrotated_layers):
        raise EngineFileError(
            f"target.unrotated_layers are {g.unrotated_layers}, expected some of {g.layers} layers"
        )
    if g.window_rope is not None:
        _check_rope("target.window_rope", g.window_rope)
    growth = g.attention.query_growth
    if growth is not None:
        _require(
            "target.attention.query_growth", "original_max_positions", growth.original_max_positions
        )
    if g.window_heads is not None:
        for name in ("kv_heads", "head_dim"):
            _require("target.window_heads", name, getattr(g.window_heads, name))
    if g.layer_inputs is not None:
        for name in ("width", "vocab"):
            _require("target.layer_inputs", name, getattr(g.layer_inputs, name))
    _require("target", "shared_caches", g.shared_caches, minimum=0)
    if set(g.layer_types) - {g.layer_types[layer] for layer in g.caching_layers}:
        raise EngineFileError(
            f"target.shared_caches is {g.shared_caches}, which leaves layers of some type without "
            "keys and values to read"
        )
    if g.multipliers is not None and g.multipliers.logits_divisor == 0:
        raise EngineFileError("target.multipliers.logits_divisor is 0, must not be")


def _check_linear(g: TargetGeometry) -> None:
    """Check the sizes of linear attention, which is present if layers use it."""
    delta = g.gated_delta
    if (delta is None) != (not g.linear_layers):
        raise EngineFileError(
            f"target has {len(g.linear_layers)} layers of linear attention, but gated_delta is "
            f"{delta}"
        )
    if delta is None:
        return
    for name, minimum in (
        ("key_heads", 1),
        ("value_heads", 1),
        ("key_width", 1),
        ("value_width", 1),
        ("taps", 2),
    ):
        _require("target.gated_delta", name, getattr(delta, name), minimum)
    _require("target.gated_delta", "row_width", delta.row_width)
    if delta.value_heads % delta.key_heads:
        raise EngineFileError(
            f"target.gated_delta: {delta.value_heads} value heads do not divide among "
            f"{delta.key_heads} key heads"
        )


def _check_feed_forwards(g: TargetGeometry) -> None:
    count, places = len(g.feed_forwards), g.layer_feed_forwards
    if len(places) != g.layers:
        raise EngineFileError(f"target has {g.layers} layers, but {len(places)} feed-forwards")
    if set(places) != set(range(count)):
        raise EngineFileError(
            f"target.layer_feed_forwards name {sorted(set(places))}, but feed_forwards are {count}"
        )
    if len(set(g.feed_forwards)) != count:
        raise EngineFileError("target.feed_forwards: two are equal")
    for place, feed_forward in enumerate(g.feed_forwards):
        _check_feed_forward(f"target.feed_forwards[{place}]", feed_forward)


def _check_feed_forward(where: str, feed_forward: FeedForward) -> None:
    if isinstance(feed_forward, DenseFeedForward):
        _require(where, "inner", feed_forward.inner)
    elif isinstance(feed_forward, BothFeedForward):
        _check_feed_forward(f"{where}.dense", feed_forward.dense)
        _check_feed_forward(f"{where}.moe", feed_forward.moe)
    elif isinstance(feed_forward, MoeFeedForward):
        _check_moe(where, feed_forward)


def _check_moe(where: str, moe: MoeFeedForward) -> None:
    for name in ("experts", "experts_per_token", "inner", "groups", "groups_chosen"):
        _require(where, name, getattr(moe, name))
    if moe.groups_chosen > moe.groups or moe.experts % moe.groups:
        raise EngineFileError(
            f"{where}: {moe.groups_chosen} of {moe.groups} groups of {moe.experts} experts"
        )
    if moe.groups_chosen < moe.groups == moe.experts and moe.group_score == "sum_of_two":
        raise EngineFileError(f"{where}: one expert a group has no sum of two to be chosen by")
    usable = moe.experts // moe.groups * moe.groups_chosen
    if moe.experts_per_token > usable:
        raise EngineFileError(
            f"{where}: {moe.experts_per_token} experts per token, but only {usable} to choose from"
        )


def _check_norm(where: str, norm: Norm) -> None:
    if norm.eps < 0:
        raise EngineFileError(f"{where}.eps is {norm.eps}, must be 0 or above")


def _check_rope(where: str, rope: Rope) -> None:
    if rope.theta <= 0:
        raise EngineFileError(f"{where}.theta is {rope.theta}, must be above 0")
    if rope.width is not None:
        _require(where, "width", rope.width)
        if rope.width % 2:
            raise EngineFileError(f"{where}.width is {rope.width}, must be even")
    scaling = rope.scaling
    if scaling is None:
        return
    if isinstance(scaling, DynamicScaling | LongRopeScaling):
        _require(f"{where}.scaling", "longest", scaling.longest, minimum=0)
    if isinstance(scaling, LongRopeScaling):
        short, long = scaling.short_factors, scaling.long_factors
        _require(f"{where}.scaling", "original_max_positions", scaling.original_max_positions)
        if len(short) != len(long) or not all(0 < factor < math.inf for factor in (*short, *long)):
            raise EngineFileError(
                f"{where}.scaling has {len(short)} short and {len(long)} long factors, expected as "
                "many of both, all above 0"
            )
        return
    if scaling.factor <= 0:
        raise EngineFileError(f"{where}.scaling.factor is {scaling.factor}, must be above 0")
    if isinstance(scaling, ProportionalScaling):
        if scaling.share > 1:
            raise EngineFileError(f"{where}.scaling.share is {scaling.share}, must be 1 or below")
    elif not isinstance(scaling, LinearScaling):
        _require(f"{where}.scaling", "original_max_positions", scaling.original_max_positions)


def _require(where: str, name: str, value: int, minimum: int = 1) -> None:
    if not minimum <= value <= _LARGEST:
        raise EngineFileError(f"{where}.{name} is {value}, must be {minimum} or above")
