"""The fields of a DeepSeek configuration."""

from __future__ import annotations

from specbuild.builder.checkpoint.config_fields import TARGET_FIELDS, FieldTable

DEEPSEEK = FieldTable(
    read=TARGET_FIELDS
    | {
        "kv_lora_rank",
        "q_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
        "intermediate_size",
        "moe_intermediate_size",
        "first_k_dense_replace",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "routed_scaling_factor",
        "num_nextn_predict_layers",
        "rope_interleave",
    },
    only={
        "attention_bias": (False,),
        "hidden_act": ("silu",),
        "moe_layer_freq": (1,),
        "quantization_config": (),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    # The two widths follow from others; the rest is training's.
    inert=frozenset({"head_dim", "qk_head_dim", "aux_loss_alpha", "ep_size", "seq_aux"}),
)
