"""Parts of targets that only the CPU backend computes, and the errors of other backends."""

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
    target: TargetGeometry, implementation: str, *, fused: frozenset[str] = frozenset()
) -> None:
    """Raise SpecbuildError for the first part of ``target`` without an implementation.

    ``implementation`` is the plural subject of the error, such as "CUDA kernels". ``fused`` has the
    names of parts that the backend's fusions handle.
    """
    part = next(unlowered_parts(target, fused), None)
    if part is not None:
        raise SpecbuildError(
            f"the model is a {target.model_type}, which {part}: {implementation} do not support "
            "this yet; build with --backend cpu"
        )


def unlowered_parts(g: TargetGeometry, fused: frozenset[str]) -> Iterator[str]:
    """Yield the parts of a target outside ``fused``, each as the predicate of a sentence."""
    return (part for name, part in _parts(g) if name not in fused)


def _parts(g: TargetGeometry) -> Iterator[tuple[str, str]]:
    """Yield the name of each part, and the predicate of a sentence about it."""
    attention = g.attention
    yield from (("states", part) for part in _states_and_gates(g))
    yield from _of_layer_types(g)
    yield from (("partial", part) for part in _partial_ropes(g))
    if g.unrotated_layers:
        yield "unrotated", f"has {len(g.unrotated_layers)} layers without RoPE"
    if g.window_rope is not None:
        yield "window rope", "rotates keys of layers with a window by another RoPE"
    if attention.qk_norm == "all_heads":
        yield "all heads", "normalizes the queries of all heads together before RoPE"
    if attention.query_growth is not None:
        yield (
            "growth",
            "multiplies queries by a factor of their position (llama_4_scaling_beta)",
        )
    if attention.scale is not None:
        yield "scale", f"multiplies scores by {attention.scale:g}, not by 1/sqrt(head_dim)"
    yield from _feed_forwards(g)
    if g.norm_places != "inputs":
        yield "output norms", "normalizes the outputs of attention and feed-forward"
    if g.multipliers is not None:
        yield "multipliers", "multiplies embeddings, residuals or logits by constants"


def _states_and_gates(g: TargetGeometry) -> Iterator[str]:
    """Yield recurrent states and output gates, which hybrid models have."""
    if g.gated_delta is not None:
        yield f"has {len(g.linear_layers)} layers with a recurrent state (gated delta nets)"
    if g.attention.output_gate:
        yield "multiplies the output of attention by a gate"
    for feed_forward in g.feed_forwards:
        if isinstance(feed_forward, BothFeedForward) and feed_forward.gated:
            yield "multiplies the output of its shared expert by a gate"


def _of_layer_types(g: TargetGeometry) -> Iterator[tuple[str, str]]:
    """Yield parts of models whose layers differ in heads, caches or inputs."""
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
        yield "layer inputs", "has an additional embedding for each layer"
    if g.attention.value_norm:
        yield "value norm", "normalizes values"


def _partial_ropes(g: TargetGeometry) -> Iterator[str]:
    for rope in (g.rope, g.window_rope):
        if rope is not None and rope.width is not None:
            yield f"rotates {rope.width} of {g.head_dim} values of a head (partial RoPE)"


def _feed_forwards(g: TargetGeometry) -> Iterator[tuple[str, str]]:
    for feed_forward in g.feed_forwards:
        if isinstance(feed_forward, DenseFeedForward) and isinstance(
            feed_forward.activation, Geglu
        ):
            yield "gelu", "has a feed-forward with GELU"
        moe = routed_part(feed_forward)
        if moe is not None and isinstance(moe.activation, Geglu):
            yield "experts with gelu", "has experts with GELU"
