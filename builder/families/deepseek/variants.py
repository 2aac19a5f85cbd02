"""The model types with DeepSeek's attention, and what the config of each has of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specbuild.builder.checkpoint.config_fields import TARGET_FIELDS, FieldTable
from specbuild.builder.families.parts.mla_config import MLA_FIELDS

_SHARED = MLA_FIELDS | {"intermediate_size"}
_EXPERTS = frozenset(
    {
        "moe_intermediate_size",
        "first_k_dense_replace",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
        "topk_method",
        "norm_topk_prob",
        "routed_scaling_factor",
        "num_nextn_predict_layers",
        "num_mtp_layers",
    }
)
# The widths follow from others; the rest is training's.
_INERT = frozenset(
    {
        "head_dim",
        "qk_head_dim",
        "aux_loss_alpha",
        "ep_size",
        "seq_aux",
        "embedding_initializer_range",
    }
)
_SAME: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
}
_ROUTED: dict[str, tuple[Any, ...]] = {**_SAME, "moe_layer_freq": (1,)}
_SIGMOIDS: dict[str, tuple[Any, ...]] = {
    **_ROUTED,
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}


@dataclass(frozen=True)
class Variant:
    """A model type: its class in transformers and the fields of its configs.

    ``dense_layers`` of the first layers have no experts where a config does not say how many; None:
    no layer ever has. ``scores`` is what a router makes of its logits.
    """

    architecture: str
    fields: FieldTable
    dense_layers: int | None
    scores: Literal["sigmoid", "softmax"] = "sigmoid"


_DEEPSEEK_V3 = Variant(
    "DeepseekV3ForCausalLM",
    FieldTable(TARGET_FIELDS | _SHARED | _EXPERTS, _SIGMOIDS, _INERT),
    dense_layers=3,
)
_YOUTU = Variant(
    "YoutuForCausalLM",
    FieldTable(TARGET_FIELDS | _SHARED, _SAME, _INERT),
    dense_layers=None,
)
VARIANTS: dict[str, Variant] = {
    "deepseek_v2": Variant(
        "DeepseekV2ForCausalLM",
        FieldTable(
            TARGET_FIELDS | _SHARED | _EXPERTS,
            {
                **_ROUTED,
                "scoring_func": ("softmax",),
                "topk_method": ("greedy", "group_limited_greedy"),
                # DeepSeek's code normalises in the place of scaling, transformers' does not.
                "norm_topk_prob": (False,),
            },
            _INERT,
        ),
        dense_layers=0,
        scores="softmax",
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": Variant(
        "Glm4MoeLiteForCausalLM",
        FieldTable(
            TARGET_FIELDS | _SHARED | _EXPERTS | {"mlp_layer_types"},
            {**_SIGMOIDS, "partial_rotary_factor": (1.0,)},
            _INERT,
        ),
        dense_layers=1,
    ),
    "youtu": _YOUTU,
    "youtu_llm": _YOUTU,
}
