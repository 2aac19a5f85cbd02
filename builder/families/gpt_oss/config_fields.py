"""The fields of a GPT-OSS configuration, in both layouts."""

from __future__ import annotations

from specbuild.builder.checkpoint.config_fields import TARGET_FIELDS, FieldTable

GPT_OSS = FieldTable(
    read=TARGET_FIELDS
    | {
        "head_dim",
        "num_local_experts",
        "num_experts",
        "num_experts_per_tok",
        "experts_per_token",
        "intermediate_size",
        "layer_types",
        "sliding_window",
        "swiglu_limit",
        "attention",
        "attention_bias",
    },
    only={"hidden_act": ("silu",)},
)

GPT_OSS_ORIGINAL = FieldTable(
    read=frozenset(
        {
            "num_hidden_layers",
            "hidden_size",
            "vocab_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "num_experts",
            "experts_per_token",
            "intermediate_size",
            "sliding_window",
            "swiglu_limit",
            "initial_context_length",
            "rope_theta",
            "rope_scaling_factor",
            "rope_ntk_alpha",
            "rope_ntk_beta",
            "attention",
        }
    ),
    only={},
)

MXFP4_QUANTIZATION = FieldTable(
    read=frozenset({"quant_method"}),
    only={},
    inert=frozenset({"modules_to_not_convert", "dequantize"}),
)
