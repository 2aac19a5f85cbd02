"""Reads a DeepSeek-V3 checkpoint: MLA with decoupled RoPE, dense and routed feed-forwards."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from specbuild.builder.checkpoint.config_fields import check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.rope import read_rope, yarn_score_factor
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.checkpoint.target_parts import read_eos
from specbuild.builder.families.deepseek.config_fields import DEEPSEEK
from specbuild.builder.families.deepseek.tensors import for_engine
from specbuild.runtime.engine_dir.geometry import (
    AttentionParts,
    BothFeedForward,
    DenseFeedForward,
    FeedForward,
    MlaGeometry,
    MoeFeedForward,
    Norm,
    Rope,
    Swiglu,
    TargetGeometry,
    distinct_feed_forwards,
)
from specbuild.runtime.errors import SpecbuildError

MODEL_TYPE = "deepseek_v3"
DEFAULT_THETA = 10000.0
# The norms of latents have it, whatever a model's config says of its other norms.
LATENT_EPS = 1e-6

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def read_deepseek_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """The geometry, and warnings.

    Raises SpecbuildError for what is not implemented and for numbers that do not go together.
    """
    warnings = check_fields(config, DEEPSEEK, strict=strict)
    geometry = _geometry(path, config)
    _check(config.where, geometry)
    return geometry, warnings


def without_predictors(
    tensors: dict[str, SourceTensor], g: TargetGeometry, config: Config
) -> tuple[dict[str, SourceTensor], tuple[str, ...]]:
    """The tensors without those of the layers that predict further tokens (MTP), and a warning."""
    end = g.layers + config.integer("num_nextn_predict_layers", 0, least=0)
    found = {
        name: int(match[1])
        for name in tensors
        if (match := _LAYER.match(name)) and g.layers <= int(match[1]) < end
    }
    if not found:
        return dict(tensors), ()
    kept = {name: tensor for name, tensor in tensors.items() if name not in found}
    layers = ", ".join(map(str, sorted(set(found.values()))))
    return kept, (
        f"target: layer {layers} predicts further tokens (num_nextn_predict_layers); nothing uses "
        f"its tensors, {len(found)} in number",
    )


def engine_tensors(
    tensors: dict[str, SourceTensor], g: TargetGeometry, _config: Config
) -> dict[str, SourceTensor]:
    """Audited tensors in the engine's forms."""
    return for_engine(tensors, g, interleaved=g.rope.interleaved)


def _geometry(path: Path, config: Config) -> TargetGeometry:
    layers, heads = config.integer("num_hidden_layers"), config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", heads) != heads:
        raise config.wrong("num_key_value_heads", f"as many as num_attention_heads, {heads}")
    rope = read_rope(config, default_theta=DEFAULT_THETA)
    rope = replace(rope, interleaved=config.boolean("rope_interleave", True))
    mla = _mla(config, rope)
    feed_forwards, layer_feed_forwards = distinct_feed_forwards(_feed_forwards(config, layers))
    return TargetGeometry(
        model_type=MODEL_TYPE,
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
        max_positions=config.integer("max_position_embeddings"),
        tied_head=config.boolean("tie_word_embeddings", False),
        eos_token_ids=read_eos((path,), config),
        latent_dims=(mla.entry_width,) * layers,
        mla=mla,
    )


def _mla(config: Config, rope: Rope) -> MlaGeometry:
    rope_dim, nope_dim = config.integer("qk_rope_head_dim"), config.integer("qk_nope_head_dim")
    return MlaGeometry(
        kv_lora_rank=config.integer("kv_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        v_dim=config.integer("v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * yarn_score_factor(config, rope),
        norm=Norm(LATENT_EPS, "before_weight"),
        q_lora_rank=config.optional_integer("q_lora_rank"),
    )


def _feed_forwards(config: Config, layers: int) -> list[FeedForward]:
    """Every layer's: a dense one in the first layers, routed and shared experts behind."""
    routed = bool(config.get("n_routed_experts"))
    first = min(config.integer("first_k_dense_replace", 0, least=0), layers) if routed else layers
    found: list[FeedForward] = []
    if first:
        inner = config.integer("intermediate_size")
        found += [DenseFeedForward(inner=inner, activation=Swiglu())] * first
    if first < layers:
        found += [_experts(config)] * (layers - first)
    return found


def _experts(config: Config) -> FeedForward:
    inner, groups = config.integer("moe_intermediate_size"), config.integer("n_group", 1)
    moe = MoeFeedForward(
        experts=config.integer("n_routed_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        inner=inner,
        storage="bf16",
        activation=Swiglu(),
        gating="sigmoid_norm" if config.boolean("norm_topk_prob", True) else "sigmoid",
        choice_bias=True,
        groups=groups,
        groups_chosen=config.integer("topk_group", groups),
        scaling=config.number("routed_scaling_factor", 1.0),
    )
    shared = config.integer("n_shared_experts", 0, least=0)
    if not shared:
        return moe
    return BothFeedForward(
        dense=DenseFeedForward(inner=shared * inner, activation=Swiglu()), moe=moe
    )


def _check(where: str, g: TargetGeometry) -> None:
    assert g.mla is not None
    wrong = []
    if g.mla.rope_dim % 2:
        wrong.append(f"qk_rope_head_dim {g.mla.rope_dim} is odd, rotary embedding needs pairs")
    if g.moe is not None:
        wrong += _misfits(g.moe)
    if wrong:
        raise SpecbuildError(f"{where}: {'; '.join(wrong)}")


def _misfits(f: MoeFeedForward) -> list[str]:
    wrong = []
    if f.groups_chosen > f.groups:
        wrong.append(f"topk_group {f.groups_chosen} of n_group {f.groups} groups")
    elif f.experts % f.groups:
        wrong.append(f"{f.experts} experts do not divide into n_group {f.groups} groups")
    elif f.groups_chosen < f.groups and f.experts < 2 * f.groups:
        wrong.append(f"{f.experts} experts in n_group {f.groups} groups, which need two or more")
    elif f.experts_per_token > (open_to_a_token := f.experts // f.groups * f.groups_chosen):
        wrong.append(
            f"{f.experts_per_token} experts per token, but only {open_to_a_token} in the "
            f"{f.groups_chosen} groups that a token takes"
        )
    return wrong
