"""Parts of targets that the CPU alone computes, each refused by name for other backends."""

from __future__ import annotations

from collections.abc import Iterator

from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    Geglu,
    routed_part,
)
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError


def require_lowered_parts(
    target: TargetGeometry, computed_by: str, *, fused: frozenset[str] = frozenset()
) -> None:
    """SpecbuildError naming the first part of ``target`` that no form of ``computed_by`` has.

    ``fused`` are parts that its fusions make others of, or take in, by the names that the parts
    have here.
    """
    part = next(unlowered_parts(target, fused), None)
    if part is not None:
        raise SpecbuildError(
            f"the model is a {target.model_type}, which {part}: {computed_by} do not compute that "
            "yet; build with --backend cpu"
        )


def unlowered_parts(g: TargetGeometry, fused: frozenset[str]) -> Iterator[str]:
    """What a target does, as the end of a sentence about it; ``fused`` are left out."""
    return (part for name, part in _parts(g) if name not in fused)


def _parts(g: TargetGeometry) -> Iterator[tuple[str, str]]:
    """What a target does: a name, and the end of a sentence about it."""
    attention = g.attention
    yield from (("states", part) for part in _states_and_gates(g))
    yield from _of_layer_types(g)
    yield from (("partial", part) for part in _partial_ropes(g))
    if g.unrotated_layers:
        yield "unrotated", f"has {len(g.unrotated_layers)} layers without RoPE"
    if g.window_rope is not None:
        yield "window rope", "turns keys of layers with a window by another RoPE"
    if attention.qk_norm == "all_heads":
        yield "all heads", "norms the queries of all heads together before they turn"
    if attention.query_growth is not None:
        yield (
            "growth",
            "multiplies queries by a factor of their position (llama_4_scaling_beta)",
        )
    if attention.scale is not None:
        yield "scale", f"multiplies scores by {attention.scale:g}, not by the head's width"
    yield from _feed_forwards(g)
    if g.norm_places != "inputs":
        yield "output norms", "norms what attention and feed-forward give"
    if g.multipliers is not None:
        yield "multipliers", "multiplies embeddings, residuals or logits by constants"


def _states_and_gates(g: TargetGeometry) -> Iterator[str]:
    """What hybrid models have beside keys and values."""
    if g.gated_delta is not None:
        yield f"has {len(g.linear_layers)} layers with a recurrent state (gated delta nets)"
    if g.attention.output_gate:
        yield "multiplies what attention gives by a gate"
    for feed_forward in g.feed_forwards:
        if isinstance(feed_forward, BothFeedForward) and feed_forward.gated:
            yield "multiplies what its shared expert gives by a gate"


def _of_layer_types(g: TargetGeometry) -> Iterator[tuple[str, str]]:
    """What models have whose layers differ in heads, caches or inputs."""
    local = g.window_heads
    if local is not None:
        yield (
            "window heads",
            f"has {local.kv_heads} KV heads of {local.head_dim} in layers with a window, "
            f"{g.kv_heads} of {g.head_dim} in others",
        )
    if g.shared_caches:
        yield (
            "shared caches",
            f"has {g.shared_caches} layers that read keys and values of other layers",
        )
    if g.layer_inputs is not None:
        yield "layer inputs", "gives each layer an embedding of its own"
    if g.attention.value_norm:
        yield "value norm", "norms values"


def _partial_ropes(g: TargetGeometry) -> Iterator[str]:
    for rope in (g.rope, g.window_rope):
        if rope is not None and rope.width is not None:
            yield f"turns {rope.width} of {g.head_dim} values of a head (partial RoPE)"


def _feed_forwards(g: TargetGeometry) -> Iterator[tuple[str, str]]:
    for feed_forward in g.feed_forwards:
        if isinstance(feed_forward, DenseFeedForward) and isinstance(
            feed_forward.activation, Geglu
        ):
            yield "gelu", "has a feed-forward with GELU"
        moe = routed_part(feed_forward)
        if moe is not None and isinstance(moe.activation, Geglu):
            yield "experts with gelu", "has experts with GELU"
