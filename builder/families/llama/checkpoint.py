"""Reads checkpoints of Llama, Qwen2, Qwen3, Qwen3-MoE and MiMo."""

from __future__ import annotations

from pathlib import Path

from specbuild.builder.checkpoint.config_fields import check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.rope import read_positions, read_rope
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.checkpoint.target_parts import read_eos
from specbuild.builder.families.llama.config_fields import FIELDS
from specbuild.builder.families.parts.experts import stacked_experts
from specbuild.runtime.engine_dir.geometry import (
    AttentionParts,
    DenseFeedForward,
    FeedForward,
    MoeFeedForward,
    Norm,
    Swiglu,
    TargetGeometry,
    distinct_feed_forwards,
    routed_part,
)
from specbuild.runtime.errors import SpecbuildError

DEFAULT_THETA = 10000.0
# What older versions of transformers wrote beside the weights: config.json gives it too.
ROTARY_TABLE = ".rotary_emb.inv_freq"


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """The geometry, and warnings.

    Raises SpecbuildError for what is not implemented and for numbers that do not go together.
    """
    kind = config.text("model_type") or ""
    warnings = check_fields(config, FIELDS[kind], strict=strict)
    if not {*config.texts("layer_types")} <= {"full_attention"}:
        raise config.wrong("layer_types", "full_attention in every layer")
    layers, heads = config.count("num_hidden_layers"), config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    feed_forwards, layer_feed_forwards = distinct_feed_forwards(_feed_forwards(config, layers))
    rope = read_rope(config, default_theta=DEFAULT_THETA)
    geometry = TargetGeometry(
        model_type=kind,
        layers=layers,
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        q_heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads if kind == "llama" else None),
        head_dim=config.optional_integer("head_dim") or _head_dim(kind, hidden, heads),
        attention=_attention(kind, config),
        norm=Norm(config.number("rms_norm_eps", 1e-6), "before_weight"),
        rope=rope,
        layer_types=("full_attention",) * layers,
        sliding_window=0,
        feed_forwards=feed_forwards,
        layer_feed_forwards=layer_feed_forwards,
        max_positions=read_positions(config, rope),
        tied_head=config.boolean("tie_word_embeddings", False),
        eos_token_ids=read_eos((path,), config),
    )
    _check(config, geometry)
    return geometry, warnings


def without_tables(
    tensors: dict[str, SourceTensor], _geometry: TargetGeometry, _config: Config
) -> tuple[dict[str, SourceTensor], tuple[str, ...]]:
    """The tensors without rotary tables, and a warning where there are some."""
    kept = {name: t for name, t in tensors.items() if not name.endswith(ROTARY_TABLE)}
    if len(kept) == len(tensors):
        return kept, ()
    return kept, (
        f"target: {len(tensors) - len(kept)} tensors *{ROTARY_TABLE} were left out; config.json "
        "gives what they hold",
    )


def engine_tensors(
    tensors: dict[str, SourceTensor], g: TargetGeometry, _config: Config
) -> dict[str, SourceTensor]:
    """Audited tensors in the engine's forms: the experts of a layer stand together."""
    made = dict(tensors)
    for index in range(g.layers):
        moe = routed_part(g.feed_forward(index))
        if moe is not None:
            made |= stacked_experts(made, f"model.layers.{index}.mlp.experts.", moe)
    return made


def _attention(kind: str, config: Config) -> AttentionParts:
    """Llama's and Qwen3's biases are optional; Qwen2 and MiMo have none of the output's."""
    if kind in ("qwen2", "mimo"):
        return AttentionParts(qkv_bias=True)
    bias = config.boolean("attention_bias", False)
    return AttentionParts(
        qkv_bias=bias, output_bias=bias, qk_norm="none" if kind == "llama" else "head"
    )


def _head_dim(kind: str, hidden: int, heads: int) -> int:
    """That of a config which names none."""
    return 128 if kind == "qwen3" else hidden // heads


def _feed_forwards(config: Config, layers: int) -> list[FeedForward]:
    """Every layer's: routed experts in each ``decoder_sparse_step``-th but some."""
    if config.get("model_type") != "qwen3_moe":
        return [_dense(config)] * layers
    step = config.integer("decoder_sparse_step", 1)
    dense = config.integers("mlp_only_layers") or ()
    routed = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    return [_experts(config) if has_experts else _dense(config) for has_experts in routed]


def _dense(config: Config) -> DenseFeedForward:
    return DenseFeedForward(
        inner=config.integer("intermediate_size"),
        activation=Swiglu(),
        bias=config.boolean("mlp_bias", False),
    )


def _experts(config: Config) -> MoeFeedForward:
    names = [name for name in ("num_experts", "num_local_experts") if config.get(name) is not None]
    counts: set[int] = {config.count(name) for name in names or ["num_experts"]}
    if len(counts) > 1:
        raise config.wrong("num_experts", f"num_local_experts, {config.get('num_local_experts')}")
    # The softmax over all, normalised over those that are chosen, is the softmax over these.
    normed = config.boolean("norm_topk_prob", False)
    return MoeFeedForward(
        experts=counts.pop(),
        experts_per_token=config.count("num_experts_per_tok"),
        inner=config.integer("moe_intermediate_size"),
        storage="bf16",
        activation=Swiglu(),
        gating="softmax_selected" if normed else "softmax_topk",
    )


def _check(config: Config, g: TargetGeometry) -> None:
    wrong, moe = [], g.moe
    if g.q_heads % g.kv_heads:
        wrong.append(f"{g.q_heads} query heads do not divide among {g.kv_heads} KV heads")
    if g.head_dim % 2:
        wrong.append(f"head_dim {g.head_dim} is odd, rotary embedding needs pairs")
    if moe is not None and moe.experts_per_token > moe.experts:
        wrong.append(f"{moe.experts_per_token} experts per token, but only {moe.experts} experts")
    if wrong:
        raise SpecbuildError(f"{config.where}: {'; '.join(wrong)}")
