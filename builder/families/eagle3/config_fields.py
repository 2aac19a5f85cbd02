"""The fields of an EAGLE3 draft's configuration."""

from __future__ import annotations

from specbuild.builder.checkpoint.config_fields import FieldTable
from specbuild.builder.families.parts.mla_config import MLA_FIELDS

# In qwen3 layers queries and keys are normed per head. The other types can have MLA.
MODEL_TYPES = ("llama", "qwen3", "deepseek_v2", "deepseek_v3", "kimi_k2")
# Fields in configs that were copied from a target with experts. The audit requires a dense MLP.
_EXPERTS = frozenset(
    {
        "aux_loss_alpha",
        "ep_size",
        "first_k_dense_replace",
        "moe_intermediate_size",
        "moe_layer_freq",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "num_nextn_predict_layers",
        "qk_head_dim",
        "routed_scaling_factor",
        "scoring_func",
        "seq_aux",
        "topk_group",
        "topk_method",
    }
)

DRAFT_DECODER = FieldTable(
    read=frozenset(
        {
            "hidden_size",
            "vocab_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
            "rms_norm_eps",
            "rope_theta",
            "rope_scaling",
            "rope_parameters",
            "layer_types",
            "sliding_window",
            "use_sliding_window",
            "num_hidden_layers",
            "attention_bias",
            "qkv_bias",
            "mlp_bias",
            "tie_word_embeddings",
        }
    )
    | MLA_FIELDS,
    only={
        "model_type": MODEL_TYPES,
        "hidden_act": ("silu",),
        "logit_scale": (1.0,),
        "quantization_config": (),
    },
    inert=_EXPERTS | {"architectures", "eos_token_id", "max_window_layers"},
)

DRAFT_TOP = FieldTable(
    read=frozenset(
        {
            "architectures",
            "draft_vocab_size",
            "target_hidden_size",
            "norm_before_residual",
            "norm_before_fc",
            "fc_norm",
            "norm_output",
            "eagle_config",
            "eagle_aux_hidden_state_layer_ids",
            "transformer_layer_config",
            "speculators_model_type",
            "tie_word_embeddings",
        }
    ),
    only={"logit_scale": (1.0,), "quantization_config": ()},
    inert=frozenset(
        {
            "model_type",
            "speculators_config",
            "speculators_version",
            "embed_requires_grad",
            "has_no_defaults_at_init",
            "eos_token_id",
            "target_model_type",
        }
    ),
)

EAGLE = FieldTable(
    read=frozenset(
        {
            "eagle_aux_hidden_state_layer_ids",
            "norm_before_residual",
            "norm_before_fc",
            "fc_norm",
            "norm_output",
        }
    ),
    only={
        "use_aux_hidden_state": (True,),
        "use_input_layernorm_in_first_layer": (True,),
        "use_last_layernorm": (True,),
        "use_mtp_layernorm": (False,),
        "parallel_draft_step": (1,),
    },
    inert=frozenset({"next_layer_regular", "has_lm_head", "parallel_draft_heads_num_layers"}),
)
