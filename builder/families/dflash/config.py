"""The configuration of a DFlash draft: as its authors write it, or speculators."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.runtime.errors import SpecbuildError

ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator", "JetSpecSpeculator")
# What drafts that are trained here call themselves.
OWN_ARCHITECTURE = ARCHITECTURES[0]
OWN_MODEL_TYPE = "qwen3"
MIN_BLOCK = 2

_LAYERS = FieldTable(
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
            "num_hidden_layers",
            "attention_bias",
            "layer_types",
        }
    ),
    only={
        "model_type": ("qwen3", "llama"),
        "hidden_act": ("silu",),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
        "quantization_config": (),
    },
    inert=frozenset(
        {
            "architectures",
            "eos_token_id",
            "max_window_layers",
            "sliding_window",
            "tie_word_embeddings",
        }
    ),
)
_TOP = FieldTable(
    read=frozenset(
        {
            "architectures",
            "block_size",
            "dflash_config",
            "mask_token_id",
            "aux_hidden_state_layer_ids",
            "num_target_layers",
            "target_hidden_size",
            "draft_vocab_size",
            "transformer_layer_config",
            "speculators_model_type",
        }
    ),
    only={
        "sample_from_anchor": (False,),
        "projector_type": ("dflash",),
        "quantization_config": (),
    },
    inert=frozenset(
        {
            "model_type",
            "speculators_config",
            "speculators_version",
            "has_no_defaults_at_init",
            "kd_temperature",
            "sliding_window_non_causal",
            "shift_label",
            "tie_word_embeddings",
        }
    ),
)
_DFLASH = FieldTable(
    read=frozenset({"block_size", "mask_token_id", "target_layer_ids", "causal_head", "causal"}),
    only={"input_embedding_scale": (1.0,)},
)


@dataclass(frozen=True)
class DFlashConfig:
    """What a config says beside its layers, whose fields are in ``decoder``.

    ``aux_layers`` are layer outputs, counted from 0.
    """

    decoder: Config
    aux_layers: tuple[int, ...]
    block_size: int
    mask_token: int
    causal: bool
    warnings: tuple[str, ...]


def is_dflash(config: Config) -> bool:
    """Whether a config has a section ``dflash_config``, or one of the architectures."""
    if config.get("dflash_config") is not None:
        return True
    return bool(set(config.texts("architectures")) & set(ARCHITECTURES))


def read_dflash_config(top: Config, *, strict: bool) -> DFlashConfig:
    """Either form; SpecbuildError for values not implemented, and with ``strict`` unknown fields.

    ``target_layer_ids`` and speculators' ``aux_hidden_state_layer_ids`` both count layer outputs.
    """
    own = top.section("dflash_config")
    nested = top.get("transformer_layer_config") is not None
    decoder = top.section("transformer_layer_config") if nested else top
    warnings = check_fields(own, _DFLASH, strict=strict)
    if nested:
        warnings += check_fields(top, _TOP, strict=strict)
        warnings += check_fields(decoder, _LAYERS, strict=strict)
    else:
        warnings += check_fields(top, _TOP, _LAYERS, strict=strict)
    kind = top.get("speculators_model_type")
    if kind not in (None, "dflash", "jetspec"):
        raise top.wrong("speculators_model_type", "'dflash' or 'jetspec'")
    _require_full_attention(decoder)
    aux_layers = own.integers("target_layer_ids") or top.integers("aux_hidden_state_layer_ids")
    if not aux_layers:
        raise SpecbuildError(
            f"{top.where}: names no layers of the target; add dflash_config.target_layer_ids, the "
            "layers whose outputs the draft reads"
        )
    causal = own.boolean("causal_head", False) or own.boolean("causal", False)
    return DFlashConfig(
        decoder=decoder,
        aux_layers=aux_layers,
        block_size=_either(top, own, "block_size", MIN_BLOCK),
        mask_token=_either(top, own, "mask_token_id", 0),
        causal=causal or kind == "jetspec",
        warnings=warnings,
    )


def _require_full_attention(decoder: Config) -> None:
    kinds = set(decoder.texts("layer_types"))
    if kinds - {"full_attention"}:
        raise SpecbuildError(
            f"{decoder.where}: layer_types has {', '.join(sorted(kinds))}; windows in the layers "
            "of a DFlash draft are not implemented, only full_attention is"
        )


def _either(top: Config, own: Config, name: str, least: int) -> int:
    """A number that stands in the section, outside of it, or in both alike."""
    places = [part for part in (own, top) if part.get(name) is not None]
    values = [part.integer(name, least=least) for part in places]
    if not values:
        raise SpecbuildError(f"{top.where}: the field {name} is missing, in dflash_config or here")
    if len(set(values)) > 1:
        raise top.wrong(name, f"dflash_config's {values[0]}")
    return values[0]
