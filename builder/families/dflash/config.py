"""The configuration of a DFlash draft, in its authors' format or that of speculators."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.runtime.errors import SpecbuildError

ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator", "JetSpecSpeculator")
# The architecture of drafts that specbuild trains.
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
    """A draft's configuration; ``decoder`` has the fields of its layers.

    ``aux_layers`` are layer outputs (0-based).
    """

    decoder: Config
    aux_layers: tuple[int, ...]
    block_size: int
    mask_token: int
    causal: bool
    warnings: tuple[str, ...]


def is_dflash(config: Config) -> bool:
    """Return whether a config has a section ``dflash_config``, or one of the architectures."""
    if config.get("dflash_config") is not None:
        return True
    return bool(set(config.texts("architectures")) & set(ARCHITECTURES))


def read_dflash_config(top: Config, *, strict: bool) -> DFlashConfig:
    """Read either format. SpecbuildError for unsupported values; ``strict`` rejects unknown fields.

    ``target_layer_ids`` and speculators' ``aux_hidden_state_layer_ids`` are both layer outputs.
    """
    section = top.section("dflash_config")
    nested = top.get("transformer_layer_config") is not None
    decoder = top.section("transformer_layer_config") if nested else top
    warnings = check_fields(section, _DFLASH, strict=strict)
    if nested:
        warnings += check_fields(top, _TOP, strict=strict)
        warnings += check_fields(decoder, _LAYERS, strict=strict)
    else:
        warnings += check_fields(top, _TOP, _LAYERS, strict=strict)
    kind = top.get("speculators_model_type")
    if kind not in (None, "dflash", "jetspec"):
        raise top.wrong("speculators_model_type", "'dflash' or 'jetspec'")
    _require_full_attention(decoder)
    aux_layers = section.integers("target_layer_ids") or top.integers("aux_hidden_state_layer_ids")
    if not aux_layers:
        raise SpecbuildError(
            f"{top.where}: the layers of the target are missing; add "
            "dflash_config.target_layer_ids, the layers whose outputs the draft reads"
        )
    causal = section.boolean("causal_head", False) or section.boolean("causal", False)
    return DFlashConfig(
        decoder=decoder,
        aux_layers=aux_layers,
        block_size=_either(top, section, "block_size", MIN_BLOCK),
        mask_token=_either(top, section, "mask_token_id", 0),
        causal=causal or kind == "jetspec",
        warnings=warnings,
    )


def _require_full_attention(decoder: Config) -> None:
    kinds = set(decoder.texts("layer_types"))
    if kinds - {"full_attention"}:
        raise SpecbuildError(
            f"{decoder.where}: layer_types: got {', '.join(sorted(kinds))}, expected only "
            "full_attention in a DFlash draft"
        )


def _either(top: Config, section: Config, name: str, least: int) -> int:
    """Return a number from the section or from outside of it; both must be equal."""
    sections = [part for part in (section, top) if part.get(name) is not None]
    values = [part.integer(name, least=least) for part in sections]
    if not values:
        raise SpecbuildError(f"{top.where}: the field {name} is missing; add it to dflash_config")
    if len(set(values)) > 1:
        raise top.wrong(name, f"dflash_config's {values[0]}")
    return values[0]
