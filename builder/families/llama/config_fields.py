"""The fields of the configs of Llama, Qwen2, Qwen3, Qwen3-MoE, MiMo and Qwen3-VL's text model."""

from __future__ import annotations

from specbuild.builder.checkpoint.config_fields import TARGET_FIELDS, FieldTable

_DENSE = TARGET_FIELDS | {"head_dim", "intermediate_size", "attention_bias"}
_ONLY = {"hidden_act": ("silu",), "partial_rotary_factor": (1.0,)}
_WINDOWS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
# Without use_sliding_window the other fields of windows have no effect.
_NO_WINDOWS = {"use_sliding_window": (False,)}

# Qwen2's biases do not depend on the config.
_QWEN2 = _DENSE - {"attention_bias"}
_BIASES = frozenset({"attention_bias"})

FIELDS = {
    "llama": FieldTable(read=_DENSE | {"mlp_bias"}, only=_ONLY),
    "qwen2": FieldTable(
        read=_QWEN2 | _WINDOWS,
        only=_ONLY | {"use_mrope": (False,)},
        inert=_BIASES,
    ),
    "mimo": FieldTable(
        read=_QWEN2 | {"layer_types", "num_nextn_predict_layers", "num_mtp_layers"},
        only=_ONLY | _NO_WINDOWS | {"use_mrope": (False,)},
        inert=_WINDOWS | _BIASES,
    ),
    "qwen3": FieldTable(read=_DENSE | _WINDOWS, only=_ONLY),
    "qwen3_vl_text": FieldTable(read=_DENSE, only=_ONLY),
    "qwen3_moe": FieldTable(
        read=_DENSE
        | {
            "num_experts",
            "num_local_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "decoder_sparse_step",
            "mlp_only_layers",
            "norm_topk_prob",
        },
        only=_ONLY | _NO_WINDOWS,
        inert=_WINDOWS,
    ),
}
