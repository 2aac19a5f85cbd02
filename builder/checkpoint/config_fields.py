"""Classifies fields of a configuration: read, without effect, or restricted to certain values.

Every family has its own tables; this file has the shared ones. A field in no table might change
what the model computes: it causes a warning, or an error with ``--strict``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specbuild.builder.checkpoint.config_json import Config
from specbuild.runtime.errors import SpecbuildError

# Fields that inference does not depend on.
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

QUANTIZATION = "quantization_config"

# Fields that every target's reader uses.
TARGET_FIELDS = frozenset(
    {
        "architectures",
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "original_max_position_embeddings",
        "eos_token_id",
        "tie_word_embeddings",
        QUANTIZATION,
    }
)


@dataclass(frozen=True)
class FieldTable:
    """The fields of one kind of configuration; ``only`` maps a field to the supported values."""

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
            "low_freq_factor",
            "high_freq_factor",
            "short_factor",
            "long_factor",
        }
    ),
    only={
        "attn_factor": (1.0,),
        "extrapolation_factor": (1.0,),
        "partial_rotary_factor": (1.0,),
    },
    # The origin of the weights, which vLLM and transformers do not read either.
    inert=frozenset({"finetuned"}),
)

# The section for additions to a checkpoint's own attention.
ATTENTION = FieldTable(
    read=frozenset(
        {"use_mla_kv", "mla_latent_dim", "enable_dsa_indexer", "dsa_top_k", "dsa_threshold"}
    ),
    only={},
    inert=frozenset(),
)


def check_fields(
    config: Config,
    *tables: FieldTable,
    strict: bool,
    way_out: str = ", or build without --strict",
) -> tuple[str, ...]:
    """Return warnings that name the unknown fields of ``config``.

    Raises SpecbuildError for an unsupported value of a field and, if ``strict``, for an unknown
    one; ``way_out`` is an alternative to removing it.
    """
    only = {name: values for table in tables for name, values in table.only.items()}
    known = INERT.union(only, *(table.read | table.inert for table in tables))
    for name, value in config.fields.items():
        if name in only and value is not None and value not in only[name]:
            if name == QUANTIZATION and not only[name]:
                raise _quantized(config, value)
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
            f"change what the model computes{way_out}"
        )
    return tuple(
        f"{config.label}: the field {name} ({_shown(config.get(name))}) is unknown and was ignored"
        for name in unknown
    )


def _quantized(config: Config, section: Any) -> SpecbuildError:
    """Return the error for quantized weights of a family without support; names the method only."""
    method = section.get("quant_method") if isinstance(section, dict) else None
    by_method = f" by {_shown(method)}" if isinstance(method, str) and method else ""
    return SpecbuildError(
        f"{config.where}: {QUANTIZATION}: these weights are quantized{by_method}, which is not "
        "implemented for this model; give the checkpoint that they were quantized from"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
