"""Which fields of a configuration are read, which are inert, and which must hold one value.

A field in none of these tables might change what the model computes: it is named in a warning, or
refused with ``--strict``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specbuild.builder.checkpoint.config_json import Config
from specbuild.runtime.errors import SpecbuildError

# Nothing of what inference computes depends on these.
INERT = frozenset(
    {
        "_name_or_path",
        "_commit_hash",
        "add_cross_attention",
        "auto_map",
        "base_model_ep_plan",
        "base_model_tp_plan",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "initial_context_length",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "length_penalty",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "torch_dtype",
        "transformers_version",
        "unsloth_version",
        "use_cache",
        "use_return_dict",
    }
)


@dataclass(frozen=True)
class FieldTable:
    """The fields of one kind of configuration; ``only`` maps a field to the values implemented."""

    read: frozenset[str]
    only: dict[str, tuple[Any, ...]]
    inert: frozenset[str] = frozenset()


ROPE = FieldTable(
    read=frozenset(
        {
            "rope_type",
            "type",
            "rope_theta",
            "factor",
            "beta_fast",
            "beta_slow",
            "truncate",
            "original_max_position_embeddings",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        }
    ),
    only={"partial_rotary_factor": (1.0,)},
)

GPT_OSS = FieldTable(
    read=frozenset(
        {
            "architectures",
            "model_type",
            "num_hidden_layers",
            "hidden_size",
            "vocab_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "num_local_experts",
            "num_experts",
            "num_experts_per_tok",
            "experts_per_token",
            "intermediate_size",
            "layer_types",
            "sliding_window",
            "max_position_embeddings",
            "rms_norm_eps",
            "swiglu_limit",
            "rope_theta",
            "rope_scaling",
            "rope_parameters",
            "eos_token_id",
            "tie_word_embeddings",
            "quantization_config",
            "attention",
        }
    ),
    only={"attention_bias": (True,), "hidden_act": ("silu",)},
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

DEEPSEEK = FieldTable(
    read=frozenset(
        {
            "architectures",
            "model_type",
            "num_hidden_layers",
            "hidden_size",
            "vocab_size",
            "num_attention_heads",
            "num_key_value_heads",
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
            "max_position_embeddings",
            "rms_norm_eps",
            "rope_theta",
            "rope_scaling",
            "rope_parameters",
            "rope_interleave",
            "eos_token_id",
            "tie_word_embeddings",
        }
    ),
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

# The section that says what stands beside a checkpoint's own attention.
ATTENTION = FieldTable(
    read=frozenset(
        {"use_mla_kv", "mla_latent_dim", "enable_dsa_indexer", "dsa_top_k", "dsa_threshold"}
    ),
    only={},
    inert=frozenset(),
)

MXFP4_QUANTIZATION = FieldTable(
    read=frozenset({"quant_method"}),
    only={},
    inert=frozenset({"modules_to_not_convert", "dequantize"}),
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
        }
    ),
    only={
        "model_type": ("llama",),
        "num_hidden_layers": (1,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "hidden_act": ("silu",),
        "tie_word_embeddings": (False,),
        "quantization_config": (),
    },
    inert=frozenset({"architectures", "eos_token_id", "max_window_layers"}),
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
        }
    ),
    only={"tie_word_embeddings": (False,), "quantization_config": ()},
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


def check_fields(config: Config, *tables: FieldTable, strict: bool) -> tuple[str, ...]:
    """Warnings that name the fields of ``config`` which no table knows.

    Raises SpecbuildError for a field with a value that is not implemented and, if ``strict``, for
    an unknown one.
    """
    only = {name: values for table in tables for name, values in table.only.items()}
    known = INERT.union(only, *(table.read | table.inert for table in tables))
    for name, value in config.fields.items():
        if name in only and value is not None and value not in only[name]:
            allowed = " or ".join(map(repr, only[name])) or "none"
            raise SpecbuildError(
                f"{config.where}: {name} {_shown(value)} is not implemented (supported: {allowed})"
            )
    unknown = sorted(
        name
        for name, value in config.fields.items()
        if name not in known and not (name.endswith(("_dropout", "_pdrop")) and value == 0)
    )
    if unknown and strict:
        raise SpecbuildError(
            f"{config.where}: unknown fields {', '.join(unknown)}; remove them if they do not "
            "change what the model computes, or build without --strict"
        )
    return tuple(
        f"{config.label}: the field {name} ({_shown(config.get(name))}) is unknown and was ignored"
        for name in unknown
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
