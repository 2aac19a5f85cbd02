"""Reads checkpoints of MiniMax-M2, and the keys of its GGUF files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.families.parts.grouped_config import (
    GROUPED_FIELDS,
    PARTIAL,
    Defaults,
    every_layer,
    grouped_geometry,
    routed_swiglu,
)
from specbuild.builder.families.parts.grouped_gguf import GroupedGguf
from specbuild.builder.families.parts.grouped_tensors import BLOCK_SPARSE_NAMES, renamed_layers
from specbuild.runtime.engine_dir.geometry import AttentionParts, TargetGeometry

FIELDS = FieldTable(
    read=GROUPED_FIELDS
    | {
        PARTIAL,
        "num_experts_per_tok",
        "num_local_experts",
        "rotary_dim",
    },
    only={
        "hidden_act": ("silu",),
        "qk_norm_type": ("per_layer",),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
        "sliding_window": (),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
    },
    # Fields of older MiniMax models, of MTP layers without weights, and of training.
    inert=frozenset(
        {
            "attn_type_list",
            "layernorm_full_attention_beta",
            "layernorm_linear_attention_beta",
            "layernorm_mlp_beta",
            "max_model_len",
            "mlp_intermediate_size",
            "mtp_transformer_layers",
            "num_mtp_modules",
            "router_jitter_noise",
            "shared_moe_mode",
            "use_mtp",
        }
    ),
)
_DEFAULTS = Defaults(theta=5e6, head_dim=128, kv_heads=8, rope_fields=frozenset({PARTIAL}))
_SIGMOID = 2  # GGUF's number for sigmoid scores


def read_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """Return the geometry and warnings.

    Raises SpecbuildError for unsupported or inconsistent values.
    """
    warnings = check_fields(config, FIELDS, strict=strict)
    if set(config.integers("attn_type_list") or ()) - {1}:
        raise config.wrong("attn_type_list", "1 (full attention) in every layer")
    moe = routed_swiglu(
        config, "num_local_experts", "intermediate_size", gating="sigmoid_norm", choice_bias=True
    )
    geometry = grouped_geometry(
        path,
        config,
        AttentionParts(qk_norm="all_heads"),
        every_layer(config, moe),
        defaults=_DEFAULTS,
    )
    return _with_rotary_width(config, geometry), warnings


def canonical_tensors(
    tensors: dict[str, SourceTensor], _geometry: TargetGeometry, _config: Config
) -> tuple[dict[str, SourceTensor], tuple[str, ...]]:
    """Return the tensors under the names of other families."""
    return renamed_layers(tensors, BLOCK_SPARSE_NAMES), ()


def _with_rotary_width(config: Config, g: TargetGeometry) -> TargetGeometry:
    """Apply ``rotary_dim``, which releases have in the place of transformers' share of a head."""
    width = config.optional_integer("rotary_dim")
    if width is None:
        return g
    if width % 2 or width > g.head_dim or g.rope.width not in (None, width):
        raise config.wrong("rotary_dim", f"{g.rope.width or 'an even number'} of {g.head_dim}")
    return replace(g, rope=replace(g.rope, width=None if width == g.head_dim else width))


def _fields(keys: ModelKeys, _model: GgufModel, _shared: dict[str, Any]) -> dict[str, Any]:
    keys.same("expert_gating_func", _SIGMOID)
    inner = keys.integer("expert_feed_forward_length")
    keys.same("feed_forward_length", inner)
    return {
        "intermediate_size": inner,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "num_local_experts": keys.parts("expert_count"),
    }


FORMS = {
    "minimax-m2": GroupedGguf(
        "minimax_m2",
        names={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        own=_fields,
        partial=True,
    ).form
}
