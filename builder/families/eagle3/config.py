"""The configuration of an EAGLE3 draft: flat, with ``eagle_config``, or of speculators."""

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
# The architecture of drafts that specbuild trains or synthesizes.
OWN_ARCHITECTURE = ARCHITECTURES[0]
OWN_MODEL_TYPE = "llama"
# The meaning of norm_output in a config: the next level reads the normed state (speculators), or
# only the head does, as in every draft (SpecForge).
NormOutput: TypeAlias = Literal["state", "head"]
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class DraftConfig:
    """A draft's configuration; ``decoder`` has the fields of its layers.

    ``aux_layers`` are layer outputs (0-based), or None without a list. ``vocab`` is None if the
    configuration has no draft vocabulary.
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
    """Read any of the three formats; ``norm_output`` is the meaning of the flag of this name.

    Raises SpecbuildError for an unsupported value, for contradictions, and, if ``strict``, for
    unknown fields.
    """
    nested = top.get("transformer_layer_config") is not None
    decoder = top.section("transformer_layer_config") if nested else top
    eagle = top.section("eagle_config")
    warnings = check_fields(eagle, EAGLE, strict=strict)
    if nested:
        warnings += check_fields(top, DRAFT_TOP, strict=strict)
        warnings += check_fields(decoder, DRAFT_DECODER, strict=strict)
    else:
        # If both tables have a field, the values of the decoder's table apply: they are narrower.
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
    """Return a flag that can be in either section; false if it is in neither."""
    values = {part.boolean(name, False) for part in (top, eagle) if part.get(name) is not None}
    if len(values) > 1:
        raise eagle.wrong(name, f"the value outside of eagle_config, {top.get(name)!r}")
    return values == {True}


def _norms_output(top: Config, eagle: Config, meaning: NormOutput | None) -> bool:
    """Return whether the next level reads the normed state."""
    is_set = _flag(top, eagle, "norm_output")
    if meaning is not None and not is_set:
        raise SpecbuildError(
            f"--draft-norm-output {meaning}: norm_output is not true in {top.where}; remove the "
            "option"
        )
    return is_set and meaning != "head"


def _norm_output_note(
    top: Config, eagle: Config, nested: bool, meaning: NormOutput | None
) -> tuple[str, ...]:
    """Return a note about a flag with different meanings in two trainers."""
    if nested or meaning is not None or not _flag(top, eagle, "norm_output"):
        return ()
    return (
        f"{top.label}: norm_output was read as in speculators: the next level reads the normed "
        "state. If SpecForge trained the draft, the norm is only before the head: build with "
        "--draft-norm-output head. The output is correct in both cases, but a wrong choice lowers "
        "the acceptance rate",
    )


def _norm_before_residual(top: Config, eagle: Config, nested: bool) -> bool:
    name = "norm_before_residual"
    if nested and top.get(name) is None:
        raise SpecbuildError(
            f"{top.where}: {name} is missing, and implementations disagree on its default; add the "
            "value that the draft was trained with"
        )
    return _flag(top, eagle, name)


def _read_aux_layers(
    top: Config, eagle: Config, target: TargetGeometry
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """``eagle_config`` lists layer outputs, the outer list layer boundaries (0: the embedding)."""
    layers, boundaries = (
        eagle.integers(AUX_LAYERS) or None,
        top.integers(AUX_LAYERS) or None,
    )  # an empty list means none
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
        f"reads the outputs of layers {list(from_boundaries)} (0-based)"
    )
    return from_boundaries, (note,)


def _sliding_window(decoder: Config) -> int:
    """Return the window of the draft's attention, 0 for none."""
    window = decoder.optional_integer("sliding_window")
    enabled = decoder.get("use_sliding_window")
    layer_types = decoder.get("layer_types")
    if layer_types is not None:
        kinds = {*decoder.texts("layer_types")}
        if kinds not in ({"full_attention"}, {"sliding_attention"}):
            raise decoder.wrong("layer_types", "full_attention or sliding_attention in every layer")
        enabled = kinds == {"sliding_attention"}
    if window is None and enabled:
        raise decoder.wrong("sliding_window", "the width of the enabled window")
    if window is not None and enabled is None:
        raise SpecbuildError(
            f"{decoder.where}: sliding_window {window} needs use_sliding_window or layer_types; "
            "add use_sliding_window true or false"
        )
    return window if window is not None and enabled else 0
