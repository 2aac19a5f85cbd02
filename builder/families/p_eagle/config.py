"""The additional fields of a P-EAGLE config."""

from __future__ import annotations

from dataclasses import replace

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.families.eagle3.config import ARCHITECTURES as EAGLE3_ARCHITECTURES
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

ARCHITECTURES = ("PEagleDraftModel", "PEagleSpeculator", "PeagleLlamaForCausalLM")
# The fields for the token of mask rows: vLLM's two, and speculators'.
MASK_TOKENS = ("pard_token", "ptd_token_id", "mask_token_id")
_MODEL_TYPE = "speculators_model_type"
# Fields of the training, which do not affect inference.
_TRAINING = frozenset(
    {
        "parallel_drafting",
        "para_num",
        "para_depths",
        "num_depths",
        "down_sample_ratio",
        "down_sample_ratio_min",
        "max_seq_len",
        "loss_type",
        "prediction_loss_weight",
        "num_aux_hidden_states",
    }
)


def is_p_eagle(config: Config) -> bool:
    """Return whether a config has a mask token for parallel drafting, or one of the architectures.

    Published drafts have EAGLE3's architecture. A config with a ``dflash_config`` is another kind
    of draft.
    """
    if config.get("dflash_config") is not None:
        return False
    has_token = any(config.get(name) is not None for name in MASK_TOKENS[:2])
    has_type = config.get(_MODEL_TYPE) == "peagle"
    return has_token or has_type or bool(set(config.texts("architectures")) & set(ARCHITECTURES))


def mask_token(config: Config, target: TargetGeometry) -> int:
    """Return the token of mask rows. SpecbuildError if it is missing or ambiguous."""
    tokens = {
        name: config.integer(name, least=0) for name in MASK_TOKENS if config.get(name) is not None
    }
    if not tokens:
        raise SpecbuildError(
            f"{config.where}: the mask token is missing; add pard_token, the token that replaced "
            "unknown tokens in training"
        )
    (name, token), *others = tokens.items()
    for other, value in others:
        if value != token:
            raise config.wrong(other, f"{name}'s {token}")
    if token >= target.vocab:
        raise config.wrong(name, f"a token below the target's vocabulary of {target.vocab}")
    return token


def as_eagle3(config: Config) -> Config:
    """Return the config of the EAGLE3 draft, without P-EAGLE's fields."""
    excluded = {*MASK_TOKENS, *_TRAINING}
    fields = {name: value for name, value in config.fields.items() if name not in excluded}
    if not set(config.texts("architectures")) & set(EAGLE3_ARCHITECTURES):
        fields["architectures"] = [EAGLE3_ARCHITECTURES[0]]
    if config.get(_MODEL_TYPE) == "peagle":
        fields[_MODEL_TYPE] = "eagle3"
    return replace(config, fields=fields)
