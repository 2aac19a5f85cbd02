"""What a P-EAGLE config says beside an EAGLE3 draft's."""

from __future__ import annotations

from dataclasses import replace

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.families.eagle3.config import ARCHITECTURES as EAGLE3_ARCHITECTURES
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

ARCHITECTURES = ("PEagleDraftModel", "PEagleSpeculator", "PeagleLlamaForCausalLM")
# Spellings of the token that stands in for drafts not known yet: vLLM's two, and speculators'.
MASK_TOKENS = ("pard_token", "ptd_token_id", "mask_token_id")
_MODEL_TYPE = "speculators_model_type"
# How a draft was trained; nothing of what it computes depends on these.
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
    """Whether a config names a mask token of parallel drafting, or one of the architectures.

    Published drafts call themselves EAGLE3's architecture. A config with a ``dflash_config`` is
    another kind of draft.
    """
    if config.get("dflash_config") is not None:
        return False
    named = any(config.get(name) is not None for name in MASK_TOKENS[:2])
    said = config.get(_MODEL_TYPE) == "peagle"
    return named or said or bool(set(config.texts("architectures")) & set(ARCHITECTURES))


def mask_token(config: Config, target: TargetGeometry) -> int:
    """The token of rows whose token is not known; SpecbuildError where none or two are named."""
    named = {
        name: config.integer(name, least=0) for name in MASK_TOKENS if config.get(name) is not None
    }
    if not named:
        raise SpecbuildError(
            f"{config.where}: names no mask token; add pard_token, the token that the draft was "
            "trained with in the place of unknown ones"
        )
    (name, token), *others = named.items()
    for other, value in others:
        if value != token:
            raise config.wrong(other, f"{name}'s {token}")
    if token >= target.vocab:
        raise config.wrong(name, f"a token below the target's vocabulary of {target.vocab}")
    return token


def as_eagle3(config: Config) -> Config:
    """The config without what is P-EAGLE's own: that of the EAGLE3 draft within."""
    own = {*MASK_TOKENS, *_TRAINING}
    fields = {name: value for name, value in config.fields.items() if name not in own}
    if not set(config.texts("architectures")) & set(EAGLE3_ARCHITECTURES):
        fields["architectures"] = [EAGLE3_ARCHITECTURES[0]]
    if config.get(_MODEL_TYPE) == "peagle":
        fields[_MODEL_TYPE] = "eagle3"
    return replace(config, fields=fields)
