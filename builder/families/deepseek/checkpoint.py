"""Reads checkpoints with DeepSeek's attention (MLA with decoupled RoPE), dense or with experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specbuild.builder.checkpoint.config_fields import check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.rope import read_positions, read_rope
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.checkpoint.target_parts import read_eos
from specbuild.builder.families.deepseek.tensors import for_engine
from specbuild.builder.families.deepseek.variants import VARIANTS, Variant
from specbuild.builder.families.parts.mla_config import read_mla
from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    FeedForward,
    MoeFeedForward,
    Swiglu,
    distinct_feed_forwards,
)
from specbuild.runtime.engine_dir.geometry import AttentionParts, Norm, TargetGeometry
from specbuild.runtime.errors import SpecbuildError

DEFAULT_THETA = 10000.0


def read_deepseek_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """Return the geometry and warnings.

    Raises SpecbuildError for unsupported or inconsistent values.
    """
    model_type = config.text("model_type")
    assert model_type is not None
    warnings = check_fields(config, VARIANTS[model_type].fields, strict=strict)
    geometry = _geometry(path, config, model_type)
    _check(config.where, geometry)
    return geometry, warnings


def engine_tensors(
    tensors: dict[str, SourceTensor], g: TargetGeometry, _config: Config
) -> dict[str, SourceTensor]:
    """Convert audited tensors to the engine's layout."""
    return for_engine(tensors, g, interleaved=g.rope.interleaved)


def _geometry(path: Path, config: Config, model_type: str) -> TargetGeometry:
    layers, heads = config.count("num_hidden_layers"), config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", heads) != heads:
        raise config.wrong("num_key_value_heads", f"as many as num_attention_heads, {heads}")
    rope = read_rope(config, default_theta=DEFAULT_THETA)
    rope = replace(rope, interleaved=config.boolean("rope_interleave", True))
    mla = read_mla(config, rope)
    feed_forwards, layer_feed_forwards = distinct_feed_forwards(
        _feed_forwards(config, VARIANTS[model_type], layers)
    )
    return TargetGeometry(
        model_type=model_type,
        layers=layers,
        hidden=config.integer("hidden_size"),
        vocab=config.integer("vocab_size"),
        q_heads=heads,
        kv_heads=1,
        head_dim=mla.entry_width,
        attention=AttentionParts(),
        norm=Norm(config.number("rms_norm_eps", 1e-6), "before_weight"),
        rope=rope,
        layer_types=("full_attention",) * layers,
        sliding_window=0,
        feed_forwards=feed_forwards,
        layer_feed_forwards=layer_feed_forwards,
        max_positions=read_positions(config, rope),
        tied_head=config.boolean("tie_word_embeddings", False),
        eos_token_ids=read_eos((path,), config),
        latent_dims=(mla.entry_width,) * layers,
        mla=mla,
    )


def _feed_forwards(config: Config, variant: Variant, layers: int) -> list[FeedForward]:
    """Return the feed-forward of every layer: a dense one, or routed and shared experts."""
    dense: list[FeedForward] = []
    experts: list[FeedForward] = []
    routed = [not is_dense for is_dense in _dense_layers(config, variant, layers)]
    if not all(routed):
        dense = [DenseFeedForward(inner=config.integer("intermediate_size"), activation=Swiglu())]
    if any(routed):
        experts = [_experts(config, variant)]
    return [(experts if has_experts else dense)[0] for has_experts in routed]


def _dense_layers(config: Config, variant: Variant, layers: int) -> list[bool]:
    """Return, for every layer, whether it has no experts.

    Raises SpecbuildError if the config's two fields for this contradict each other.
    """
    if variant.dense_layers is None or not config.get("n_routed_experts"):
        return [True] * layers
    first, kinds = config.get("first_k_dense_replace"), config.texts("mlp_layer_types")
    count = config.integer("first_k_dense_replace", variant.dense_layers, least=0)
    by_count = [layer < count for layer in range(layers)]
    if not kinds:
        return by_count
    if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        raise config.wrong("mlp_layer_types", f'"dense" or "sparse" for each of {layers} layers')
    by_kind = [kind == "dense" for kind in kinds]
    if first is not None and by_kind != by_count:
        raise SpecbuildError(
            f"{config.where}: first_k_dense_replace {first} and mlp_layer_types differ; remove the "
            "wrong one"
        )
    return by_kind


def _experts(config: Config, variant: Variant) -> FeedForward:
    inner = config.integer("moe_intermediate_size")
    softmax = variant.scores == "softmax"
    normalized = config.boolean("norm_topk_prob", not softmax)
    groups = groups_chosen = 1
    if not softmax or config.text("topk_method") == "group_limited_greedy":
        groups = config.count("n_group", 1)
        groups_chosen = config.count("topk_group", groups)
    moe = MoeFeedForward(
        experts=config.count("n_routed_experts"),
        experts_per_token=config.count("num_experts_per_tok"),
        inner=inner,
        storage="bf16",
        activation=Swiglu(),
        gating="softmax_topk" if softmax else "sigmoid_norm" if normalized else "sigmoid",
        choice_bias=not softmax,
        groups=groups,
        groups_chosen=groups_chosen,
        group_score="max" if softmax else "sum_of_two",
        scaling=config.number("routed_scaling_factor", 1.0),
    )
    shared = config.count("n_shared_experts", 0, least=0)
    if not shared:
        return moe
    return BothFeedForward(
        dense=DenseFeedForward(inner=shared * inner, activation=Swiglu()), moe=moe
    )


def _check(where: str, g: TargetGeometry) -> None:
    problems = _misfits(g.moe) if g.moe is not None else []
    if problems:
        raise SpecbuildError(f"{where}: {'; '.join(problems)}")


def _misfits(f: MoeFeedForward) -> list[str]:
    problems = []
    if f.groups_chosen > f.groups:
        problems.append(f"topk_group {f.groups_chosen} of n_group {f.groups} groups")
    elif f.experts % f.groups:
        problems.append(f"{f.experts} experts are not a multiple of n_group {f.groups}")
    elif f.group_score == "sum_of_two" and f.groups_chosen < f.groups == f.experts:
        problems.append(f"n_group {f.groups} leaves one expert per group, expected two or more")
    elif f.experts_per_token > (eligible := f.experts // f.groups * f.groups_chosen):
        problems.append(
            f"{f.experts_per_token} experts per token, but the {f.groups_chosen} groups of a token "
            f"have only {eligible}"
        )
    return problems
