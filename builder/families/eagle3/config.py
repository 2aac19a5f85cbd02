"""The configuration of an EAGLE3 draft: flat, with an ``eagle_config``, or that of speculators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from specbuild.builder.checkpoint.config_fields import check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.families.eagle3.config_fields import DRAFT_DECODER, DRAFT_TOP, EAGLE
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3LlamaForCausalLM",
    "Eagle3DraftModel",
    "LlamaForCausalLMEagle3Deep",
    "Eagle3DeepseekV2ForCausalLM",
    "Eagle3DeepseekV3ForCausalLM",
)
# What drafts that are trained or made up here call themselves.
OWN_ARCHITECTURE = ARCHITECTURES[0]
OWN_MODEL_TYPE = "llama"
# What a config's norm_output norms: the state that the next level reads (speculators), or what the
# head reads, which every draft norms (SpecForge).
NormOutput: TypeAlias = Literal["state", "head"]
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class DraftConfig:
    """What a draft's configuration says; ``decoder`` holds the fields of its layers.

    ``aux_layers`` are layer outputs (0-based), None where no list is given; ``vocab`` is None where
    the configuration names no draft vocabulary.
    """

    architecture: str
    top: Config
    decoder: Config
    aux_layers: tuple[int, ...] | None
    vocab: int | None
    target_hidden: int | None
    norm_before_fc: bool
    fc_norm: bool
    norm_before_residual: bool
    norm_output: bool
    sliding_window: int
    tied_head: bool
    warnings: tuple[str, ...]


def read_draft_config(
    top: Config, target: TargetGeometry, strict: bool, norm_output: NormOutput | None
) -> DraftConfig:
    """Read any of the three forms; ``norm_output`` is what the flag of this name means.

    Raises SpecbuildError for a value that is not implemented, for contradictions, and, if
    ``strict``, for unknown fields.
    """
    nested = top.get("transformer_layer_config") is not None
    decoder = top.section("transformer_layer_config") if nested else top
    eagle = top.section("eagle_config")
    warnings = check_fields(eagle, EAGLE, strict=strict)
    if nested:
        warnings += check_fields(top, DRAFT_TOP, strict=strict)
        warnings += check_fields(decoder, DRAFT_DECODER, strict=strict)
    else:
        # Of a field that both tables know, the decoder's values bind: they are the narrower ones.
        warnings += check_fields(top, DRAFT_TOP, DRAFT_DECODER, strict=strict)
    if top.get("speculators_model_type") not in (None, "eagle3"):
        raise top.wrong("speculators_model_type", "'eagle3'")
    aux_layers, note = _read_aux_layers(top, eagle, target)
    return DraftConfig(
        architecture=next(name for name in top.texts("architectures") if name in ARCHITECTURES),
        top=top,
        decoder=decoder,
        aux_layers=aux_layers,
        vocab=top.optional_integer("draft_vocab_size"),
        target_hidden=top.optional_integer("target_hidden_size"),
        norm_before_fc=_flag(top, eagle, "norm_before_fc"),
        fc_norm=_flag(top, eagle, "fc_norm"),
        norm_before_residual=_norm_before_residual(top, eagle, nested),
        norm_output=_norms_output(top, eagle, norm_output),
        sliding_window=_sliding_window(decoder),
        tied_head=top.boolean("tie_word_embeddings", False)
        or decoder.boolean("tie_word_embeddings", False),
        warnings=warnings + note + _norm_output_note(top, eagle, nested, norm_output),
    )


def _flag(top: Config, eagle: Config, name: str) -> bool:
    """A flag that may stand in either place, false where it stands in none."""
    values = {part.boolean(name, False) for part in (top, eagle) if part.get(name) is not None}
    if len(values) > 1:
        raise eagle.wrong(name, f"the value outside of eagle_config, {top.get(name)!r}")
    return values == {True}


def _norms_output(top: Config, eagle: Config, meaning: NormOutput | None) -> bool:
    """Whether the next level reads the normed state."""
    said = _flag(top, eagle, "norm_output")
    if meaning is not None and not said:
        raise SpecbuildError(
            f"--draft-norm-output {meaning}: norm_output is not true in {top.where}; leave it out"
        )
    return said and meaning != "head"


def _norm_output_note(
    top: Config, eagle: Config, nested: bool, meaning: NormOutput | None
) -> tuple[str, ...]:
    """What to know of a flag that two trainers mean differently."""
    if nested or meaning is not None or not _flag(top, eagle, "norm_output"):
        return ()
    return (
        f"{top.label}: norm_output was read as speculators means it, the next level reads the "
        "normed state; if SpecForge trained the draft, where it is the norm before the head only, "
        "build with --draft-norm-output head (tokens are right either way, fewer are accepted if "
        "it is wrong)",
    )


def _norm_before_residual(top: Config, eagle: Config, nested: bool) -> bool:
    name = "norm_before_residual"
    if nested and top.get(name) is None:
        raise SpecbuildError(
            f"{top.where}: {name} is missing; readers of this format disagree on its default, so "
            "add the value that the draft was trained with"
        )
    return _flag(top, eagle, name)


def _read_aux_layers(
    top: Config, eagle: Config, target: TargetGeometry
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """``eagle_config`` counts layer outputs, a list outside of it boundaries (0: the embedding)."""
    layers, boundaries = (
        eagle.integers(AUX_LAYERS) or None,
        top.integers(AUX_LAYERS) or None,
    )  # []: none named
    if boundaries is None:
        return layers, ()
    from_boundaries = tuple(boundary - 1 for boundary in boundaries)
    if layers is not None:
        if layers not in (boundaries, from_boundaries):
            raise eagle.wrong(
                AUX_LAYERS, f"the layers of the list outside of eagle_config, {boundaries}"
            )
        return layers, ()
    if min(boundaries, default=1) < 1 or max(boundaries, default=1) > target.layers:
        raise top.wrong(
            AUX_LAYERS, f"layer boundaries from 1 to {target.layers} (0 is the embedding)"
        )
    note = (
        f"{top.label}: {AUX_LAYERS} {list(boundaries)} was read as layer boundaries: the draft "
        f"reads the outputs of layers {list(from_boundaries)}, counted from 0"
    )
    return from_boundaries, (note,)


def _sliding_window(decoder: Config) -> int:
    """The window of the draft's own attention, 0 for none."""
    window = decoder.optional_integer("sliding_window")
    enabled = decoder.get("use_sliding_window")
    layer_types = decoder.get("layer_types")
    if layer_types is not None:
        kinds = {*decoder.texts("layer_types")}
        if kinds not in ({"full_attention"}, {"sliding_attention"}):
            raise decoder.wrong("layer_types", "full_attention or sliding_attention in every layer")
        enabled = kinds == {"sliding_attention"}
    if window is None and enabled:
        raise decoder.wrong("sliding_window", "the width of the window that is switched on")
    if window is not None and enabled is None:
        raise SpecbuildError(
            f"{decoder.where}: sliding_window {window} is given without use_sliding_window or "
            "layer_types; add use_sliding_window true or false"
        )
    return window if window is not None and enabled else 0
