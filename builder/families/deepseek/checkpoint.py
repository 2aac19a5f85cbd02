"""Reads a DeepSeek-V3 checkpoint: MLA with decoupled RoPE, dense and routed feed-forwards."""

from __future__ import annotations

import re
from pathlib import Path

from specbuild.builder.checkpoint.audit import audit
from specbuild.builder.checkpoint.config_fields import DEEPSEEK, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.hints import feed_forward_hints
from specbuild.builder.checkpoint.indexers import INDEXER_FILE
from specbuild.builder.checkpoint.latents import LATENT_FILE
from specbuild.builder.checkpoint.rope import read_rope, yarn_score_factor
from specbuild.builder.checkpoint.source import SourceTensor, open_directory
from specbuild.builder.checkpoint.target_parts import (
    TargetCheckpoint,
    read_eos,
    text_files,
    tie_head,
)
from specbuild.builder.families.deepseek.tensors import deepseek_tensors, for_engine
from specbuild.runtime.engine_dir.manifest import (
    MixedFeedForward,
    MlaGeometry,
    Rope,
    TargetGeometry,
)
from specbuild.runtime.errors import SpecbuildError

MODEL_TYPE = "deepseek_v3"
DEFAULT_THETA = 10000.0

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def read_deepseek(
    path: Path, config: Config, *, strict: bool, mla: bool, dsa: bool | None
) -> TargetCheckpoint:
    """Read the headers of the checkpoint at ``path``; no weights are loaded.

    Raises SpecbuildError if it does not hold exactly the tensors that its configuration asks for,
    or has beside it what GPT-OSS layers alone can use; ``strict`` also refuses unknown fields.
    """
    warnings = check_fields(config, DEEPSEEK, strict=strict)
    geometry = _geometry(path, config)
    _check(config.where, geometry)
    _refuse_retrofits(path, mla=mla, dsa=dsa)
    if not geometry.eos_token_ids:
        warnings += ("target: no EOS token is named; output ends at its length only",)
    tensors, more = _without_predictors(open_directory(path), geometry, config)
    if config.boolean("tie_word_embeddings", False):
        tie_head(path, tensors)
    audit(str(path), deepseek_tensors(geometry), tensors, feed_forward_hints(geometry, tensors))
    interleaved = config.boolean("rope_interleave", True)
    return TargetCheckpoint(
        geometry,
        for_engine(tensors, geometry, interleaved=interleaved),
        warnings + more,
        text_files((path,)),
    )


def _geometry(path: Path, config: Config) -> TargetGeometry:
    layers, heads = config.integer("num_hidden_layers"), config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", heads) != heads:
        raise config.wrong("num_key_value_heads", f"as many as num_attention_heads, {heads}")
    rope = read_rope(config, default_theta=DEFAULT_THETA)
    mla = _mla(config, rope)
    feed_forward = _feed_forward(config, layers)
    routed = feed_forward.dense_layers < layers
    return TargetGeometry(
        model_type=MODEL_TYPE,
        layers=layers,
        hidden=config.integer("hidden_size"),
        vocab=config.integer("vocab_size"),
        q_heads=heads,
        kv_heads=1,
        head_dim=mla.entry_width,
        experts=config.integer("n_routed_experts") if routed else 0,
        experts_per_token=config.integer("num_experts_per_tok") if routed else 0,
        expert_inner=config.integer("moe_intermediate_size") if routed else 0,
        expert_format="bf16",
        layer_types=("full_attention",) * layers,
        sliding_window=0,
        max_positions=config.integer("max_position_embeddings"),
        rms_eps=config.number("rms_norm_eps", 1e-6),
        swiglu_limit=0.0,
        rope=rope,
        eos_token_ids=read_eos((path,), config),
        latent_dims=(mla.entry_width,) * layers,
        mla=mla,
        feed_forward=feed_forward,
    )


def _mla(config: Config, rope: Rope) -> MlaGeometry:
    rope_dim, nope_dim = config.integer("qk_rope_head_dim"), config.integer("qk_nope_head_dim")
    return MlaGeometry(
        kv_lora_rank=config.integer("kv_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        v_dim=config.integer("v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * yarn_score_factor(config, rope),
        q_lora_rank=config.optional_integer("q_lora_rank"),
    )


def _feed_forward(config: Config, layers: int) -> MixedFeedForward:
    routed = bool(config.get("n_routed_experts"))
    first = min(config.integer("first_k_dense_replace", 0, least=0), layers) if routed else layers
    inner = config.integer("intermediate_size") if first else 0
    if first == layers:
        return MixedFeedForward(layers, inner, 0, 1, 1, normalised=True, scaling=1.0)
    shared = config.integer("n_shared_experts", 0, least=0)
    groups = config.integer("n_group", 1)
    return MixedFeedForward(
        dense_layers=first,
        dense_inner=inner,
        shared_inner=shared * config.integer("moe_intermediate_size"),
        groups=groups,
        groups_chosen=config.integer("topk_group", groups),
        normalised=config.boolean("norm_topk_prob", True),
        scaling=config.number("routed_scaling_factor", 1.0),
    )


def _check(where: str, g: TargetGeometry) -> None:
    assert g.mla is not None and g.feed_forward is not None
    wrong, f = [], g.feed_forward
    if g.mla.rope_dim % 2:
        wrong.append(f"qk_rope_head_dim {g.mla.rope_dim} is odd, rotary embedding needs pairs")
    if f.groups_chosen > f.groups:
        wrong.append(f"topk_group {f.groups_chosen} of n_group {f.groups} groups")
    elif g.experts % f.groups:
        wrong.append(f"{g.experts} experts do not divide into n_group {f.groups} groups")
    elif f.groups_chosen < f.groups and g.experts < 2 * f.groups:
        wrong.append(f"{g.experts} experts in n_group {f.groups} groups, which need two or more")
    elif g.experts_per_token > (open_to_a_token := g.experts // f.groups * f.groups_chosen):
        wrong.append(
            f"{g.experts_per_token} experts per token, but only {open_to_a_token} in the "
            f"{f.groups_chosen} groups that a token takes"
        )
    if wrong:
        raise SpecbuildError(f"{where}: {'; '.join(wrong)}")


def _refuse_retrofits(path: Path, *, mla: bool, dsa: bool | None) -> None:
    if mla and (path / LATENT_FILE).is_file():
        raise SpecbuildError(
            f"{path / LATENT_FILE}: a {MODEL_TYPE} caches latents of its own, and latents in the "
            "place of keys and values belong to gpt_oss; remove the file, or build with --no-mla"
        )
    if dsa:
        raise SpecbuildError(
            f"--dsa: indexers ({INDEXER_FILE}) are built for gpt_oss, {path} is a {MODEL_TYPE}; "
            "leave it out"
        )


def _without_predictors(
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
