"""The configuration of a DFlash draft in its published dialects.

z-lab and SpecForge have a section for the block's fields, DeepSpec has them at the top level, and
speculators has the layers' fields in a section. The names of sections differ by trainer.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.runtime.errors import SpecbuildError

# The architectures of DSpark. Without a Markov head (markov_rank 0) their drafts are DFlash's.
DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator")
_DFLASH_2 = "DFlash2DraftModel"
ARCHITECTURES = (
    "DFlashDraftModel",
    "DFlashSpeculator",
    "JetSpecSpeculator",
    *DSPARK,
    _DFLASH_2,
)
# The sections with the block's fields, in the order in which they are read.
SECTIONS = ("dspark_config", "dflash_config", "jetspec_config")
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
            *SECTIONS,
            "aux_hidden_state_layer_ids",
            "num_target_layers",
            "target_hidden_size",
            "draft_vocab_size",
            "transformer_layer_config",
            "speculators_model_type",
        }
    ),
    only={"quantization_config": ()},
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
_CAUSAL = ("causal_head", "causal", "is_causal")
# The fields of a block: in a section, or at the top level.
_BLOCK = FieldTable(
    read=frozenset(
        {
            "block_size",
            "mask_token_id",
            "target_layer_ids",
            "markov_rank",
            "projector_type",
            "sample_from_anchor",
            *_CAUSAL,
        }
    ),
    only={"input_embedding_scale": (1.0,)},
    # The confidence head estimates acceptance; it changes no token.
    inert=frozenset({"confidence_head_with_markov", "enable_confidence_head", "markov_head_type"}),
)
# Heads that choose a token after the one before it, by a field that only they have.
_SEQUENTIAL_HEADS = {
    "conv_kernel_size": "DFlash 2 (convolutions in the block)",
    "selector_rank": "DFlash 2 (a candidate selector)",
    "gru_hidden_dim": "Domino (a GRU over the block's tokens)",
}


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
    from_anchor: bool
    warnings: tuple[str, ...]


def is_dflash(config: Config) -> bool:
    """Return whether a config has a section of a block's fields, or one of the architectures."""
    if any(config.get(name) is not None for name in SECTIONS):
        return True
    return bool(set(config.texts("architectures")) & set(ARCHITECTURES))


def read_dflash_config(top: Config, *, strict: bool) -> DFlashConfig:
    """Read any dialect. SpecbuildError for unsupported values; ``strict`` rejects unknown fields.

    ``target_layer_ids`` and speculators' ``aux_hidden_state_layer_ids`` are both layer outputs.
    """
    sections = [top.section(name) for name in SECTIONS if top.get(name) is not None]
    block = _Block([*sections, top])
    _refuse_sequential_heads(top, block)
    nested = top.get("transformer_layer_config") is not None
    decoder = top.section("transformer_layer_config") if nested else top
    warnings: tuple[str, ...] = ()
    for section in sections:
        warnings += check_fields(section, _BLOCK, strict=strict)
    if nested:
        warnings += check_fields(top, _TOP, _BLOCK, strict=strict)
        warnings += check_fields(decoder, _LAYERS, strict=strict)
    else:
        warnings += check_fields(top, _TOP, _BLOCK, _LAYERS, strict=strict)
    kind = top.get("speculators_model_type")
    if kind not in (None, "dflash", "jetspec", "dspark"):
        raise top.wrong("speculators_model_type", "'dflash', 'jetspec' or 'dspark'")
    _require_full_attention(decoder)
    holder = block.holder("target_layer_ids")
    aux_layers = holder.integers("target_layer_ids") if holder is not None else None
    aux_layers = aux_layers or top.integers("aux_hidden_state_layer_ids")
    if not aux_layers:
        raise SpecbuildError(
            f"{top.where}: the layers of the target are missing; add "
            "dflash_config.target_layer_ids, the layers whose outputs the draft reads"
        )
    is_jetspec = kind == "jetspec" or top.get("jetspec_config") is not None
    return DFlashConfig(
        decoder=decoder,
        aux_layers=aux_layers,
        block_size=block.integer("block_size", MIN_BLOCK),
        mask_token=block.integer("mask_token_id", 0),
        causal=is_jetspec or any(block.flag(name, default=False) for name in _CAUSAL),
        from_anchor=block.flag("sample_from_anchor", default=is_dspark(top)),
        warnings=warnings,
    )


def is_dspark(top: Config) -> bool:
    """Return whether DSpark's trainers wrote the config, whatever head it has."""
    projectors = {top.section(name).get("projector_type") for name in SECTIONS}
    return (
        "dspark" in {top.get("speculators_model_type"), top.get("projector_type"), *projectors}
        or top.get("dspark_config") is not None
        or bool(set(top.texts("architectures")) & set(DSPARK))
    )


class _Block:
    """The block's fields in ``places``; a field may be in several of them with equal values."""

    def __init__(self, places: list[Config]) -> None:
        self._places = places

    def holder(self, name: str) -> Config | None:
        """Return the first place that has the field, or None. SpecbuildError if values differ."""
        holders = [part for part in self._places if part.get(name) is not None]
        for other in holders[1:]:
            if other.get(name) != holders[0].get(name):
                first = holders[0]
                raise other.wrong(name, f"the value in {first.where}, {first.get(name)!r}")
        return holders[0] if holders else None

    def integer(self, name: str, least: int) -> int:
        """Return a required number of at least ``least``."""
        holder = self.holder(name)
        if holder is None:
            where = self._places[-1].where
            raise SpecbuildError(f"{where}: the field {name} is missing; add it to dflash_config")
        return holder.integer(name, least=least)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean."""
        holder = self.holder(name)
        return default if holder is None else holder.boolean(name, default)


def _refuse_sequential_heads(top: Config, block: _Block) -> None:
    """Raise SpecbuildError for a draft whose tokens depend on other tokens of its block."""
    head = next((head for name, head in _SEQUENTIAL_HEADS.items() if block.holder(name)), None)
    if _DFLASH_2 in top.texts("architectures"):
        head = _SEQUENTIAL_HEADS["selector_rank"]
    rank = block.holder("markov_rank")
    if rank is not None and rank.integer("markov_rank", least=0):
        head = f"DSpark with a Markov head (markov_rank {rank.get('markov_rank')})"
    projector = block.holder("projector_type")
    kind = None if projector is None else projector.text("projector_type")
    if kind == "domino":
        head = _SEQUENTIAL_HEADS["gru_hidden_dim"]
    if head is not None:
        raise SpecbuildError(
            f"{top.where}: {head} is not supported; use a DFlash, JetSpec, P-EAGLE or EAGLE3 draft"
        )
    if projector is not None and kind not in ("dflash", "dspark", "jetspec"):
        raise projector.wrong("projector_type", "'dflash', 'dspark' or 'jetspec'")


def _require_full_attention(decoder: Config) -> None:
    kinds = set(decoder.texts("layer_types"))
    if kinds - {"full_attention"}:
        raise SpecbuildError(
            f"{decoder.where}: layer_types: got {', '.join(sorted(kinds))}, expected only "
            "full_attention in a DFlash draft"
        )
