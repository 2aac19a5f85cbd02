"""The model types with DeepSeek's attention, and the fields of their configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specbuild.builder.checkpoint.config_fields import TARGET_FIELDS, FieldTable
from specbuild.builder.families.parts.mla_config import MLA_FIELDS

_ATTENTION = MLA_FIELDS | {"intermediate_size"}
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
# The widths follow from other fields, and the rest affects training only.
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
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
}
_FIXED_WITH_EXPERTS: dict[str, tuple[Any, ...]] = {**_FIXED, "moe_layer_freq": (1,)}
_FIXED_WITH_SIGMOID: dict[str, tuple[Any, ...]] = {
    **_FIXED_WITH_EXPERTS,
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}


@dataclass(frozen=True)
class Variant:
    """A model type: its class in transformers and the fields of its configs.

    ``dense_layers`` is the default number of first layers without experts; None means that no
    layer ever has experts. ``scores`` is the function that a router applies to its logits.
    """

    architecture: str
    fields: FieldTable
    dense_layers: int | None
    scores: Literal["sigmoid", "softmax"] = "sigmoid"


_DEEPSEEK_V3 = Variant(
    "DeepseekV3ForCausalLM",
    FieldTable(TARGET_FIELDS | _ATTENTION | _EXPERTS, _FIXED_WITH_SIGMOID, _INERT),
    dense_layers=3,
)
_YOUTU = Variant(
    "YoutuForCausalLM",
    FieldTable(TARGET_FIELDS | _ATTENTION, _FIXED, _INERT),
    dense_layers=None,
)
VARIANTS: dict[str, Variant] = {
    "deepseek_v2": Variant(
        "DeepseekV2ForCausalLM",
        FieldTable(
            TARGET_FIELDS | _ATTENTION | _EXPERTS,
            {
                **_FIXED_WITH_EXPERTS,
                "scoring_func": ("softmax",),
                "topk_method": ("greedy", "group_limited_greedy"),
                # If true, DeepSeek's code normalizes instead of scaling; transformers scales.
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
            TARGET_FIELDS | _ATTENTION | _EXPERTS | {"mlp_layer_types"},
            {**_FIXED_WITH_SIGMOID, "partial_rotary_factor": (1.0,)},
            _INERT,
        ),
        dense_layers=1,
    ),
    "youtu": _YOUTU,
    "youtu_llm": _YOUTU,
}
