"""Reads checkpoints of GLM-4.5 to 4.7, and the keys of their GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.families.parts.grouped_config import (
    GROUPED_FIELDS,
    GROUPED_ONLY,
    PARTIAL,
    Defaults,
    dense_swiglu,
    grouped_geometry,
    routed_swiglu,
)
from specbuild.builder.families.parts.grouped_gguf import GroupedGguf, dense_fields, has_biases
from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    FeedForward,
    Swiglu,
)
from specbuild.runtime.engine_dir.geometry import AttentionParts, TargetGeometry
from specbuild.runtime.errors import SpecbuildError

FIELDS = FieldTable(
    read=GROUPED_FIELDS
    | {
        PARTIAL,
        "attention_bias",
        "first_k_dense_replace",
        "moe_intermediate_size",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "num_mtp_layers",
        "num_nextn_predict_layers",
        "routed_scaling_factor",
        "topk_group",
        "use_qk_norm",
    },
    only=GROUPED_ONLY | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
)
_DEFAULTS = Defaults(eps=1e-5, kv_heads=8, partial_rotary=0.5, rope_fields=frozenset({PARTIAL}))
_SIGMOID = 2  # GGUF's number for sigmoid scores


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """Return the geometry and warnings.

    Raises SpecbuildError for unsupported or inconsistent values.
    """
    warnings = check_fields(config, FIELDS, strict=strict)
    attention = AttentionParts(
        qkv_bias=config.boolean("attention_bias", False),
        qk_norm="head" if config.boolean("use_qk_norm", False) else "none",
    )
    layers = config.count("num_hidden_layers")
    dense = min(layers, config.integer("first_k_dense_replace", 1, least=0))
    experts = [_experts(config)] * (layers - dense)
    feed_forwards: list[FeedForward] = [dense_swiglu(config)] * dense
    geometry = grouped_geometry(
        path, config, attention, [*feed_forwards, *experts], defaults=_DEFAULTS
    )
    return geometry, warnings


def _experts(config: Config) -> FeedForward:
    """Return routed experts, with shared ones if the config has them."""
    is_normalized = config.boolean("norm_topk_prob", True)
    groups = config.count("n_group", 1)
    moe = routed_swiglu(
        config,
        "n_routed_experts",
        "moe_intermediate_size",
        gating="sigmoid_norm" if is_normalized else "sigmoid",
        choice_bias=True,
        groups=groups,
        groups_chosen=config.count("topk_group", groups),
        scaling=config.number("routed_scaling_factor", 1.0),
    )
    if moe.groups_chosen > groups or moe.experts % groups:
        raise SpecbuildError(
            f"{config.where}: topk_group {moe.groups_chosen} and n_group {groups} do not fit "
            f"{moe.experts} experts; n_group must divide them, and topk_group be at most n_group"
        )
    shared = config.count("n_shared_experts", 1, least=0)
    if not shared:
        return moe
    return BothFeedForward(
        dense=DenseFeedForward(inner=shared * moe.inner, activation=Swiglu()), moe=moe
    )


def _fields(keys: ModelKeys, model: GgufModel, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of experts; the layers of a file include the MTP layer."""
    keys.same("expert_gating_func", _SIGMOID)
    predictors = keys.parts("nextn_predict_layers", 0)
    return dense_fields(keys, model, shared) | {
        "attention_bias": has_biases(model),
        "first_k_dense_replace": keys.parts("leading_dense_block_count", 0),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_group": keys.integer("expert_group_count", 1),
        "n_routed_experts": keys.parts("expert_count"),
        "n_shared_experts": keys.integer("expert_shared_count", 0, least=0),
        "norm_topk_prob": keys.boolean("expert_weights_norm", True),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "num_hidden_layers": max(1, shared["num_hidden_layers"] - predictors),
        "num_nextn_predict_layers": predictors,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "topk_group": keys.integer("expert_group_used_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors,
    }


_SHARED = "mlp.shared_experts"
FORMS = {
    "glm4moe": GroupedGguf(
        "glm4_moe",
        names={
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            "ffn_down_shexp": f"{_SHARED}.down_proj",
            "ffn_gate_shexp": f"{_SHARED}.gate_proj",
            "ffn_up_shexp": f"{_SHARED}.up_proj",
            "nextn.eh_proj": "eh_proj",
            "nextn.embed_tokens": "embed_tokens",
            "nextn.enorm": "enorm",
            "nextn.hnorm": "hnorm",
            "nextn.shared_head_head": "shared_head.head",
            "nextn.shared_head_norm": "shared_head.norm",
            "post_attention_norm": "post_attention_layernorm",
        },
        own=_fields,
        partial=True,
    ).form
}
