"""Reads the checkpoints of targets and drafts of all families."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from specbuild.builder.checkpoint.audit import audit
from specbuild.builder.checkpoint.config_fields import ATTENTION, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.gguf.container import is_gguf
from specbuild.builder.checkpoint.indexers import INDEXER_FILE, read_indexers
from specbuild.builder.checkpoint.latents import LATENT_FILE, read_latents
from specbuild.builder.checkpoint.opened import OpenedTarget, open_target
from specbuild.builder.checkpoint.predictors import split_predictors, unused_predictors
from specbuild.builder.checkpoint.quantization.modelopt import with_modelopt
from specbuild.builder.checkpoint.quantization.registry import float_tensors
from specbuild.builder.checkpoint.quantization.scheme import drop_zero_biases
from specbuild.builder.checkpoint.source import has_file, read_config, refuse_gguf
from specbuild.builder.checkpoint.target_parts import TargetCheckpoint, tie_head
from specbuild.builder.families.family import TargetFamily
from specbuild.builder.families.registry import (
    DRAFTS,
    TARGETS,
    gguf_forms,
    retrofit_targets,
    supported_targets,
    target_family,
)
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.geometry_check import check_target
from specbuild.runtime.errors import EngineFileError, SpecbuildError

# The value of --draft for the MTP layer of the target's checkpoint.
OWN_DRAFT = next(name for name, family in DRAFTS.items() if family.in_target)
DRAFT_LABEL = "draft config.json"
# The maximum number of experts in all layers, ten times that of the largest models. Each expert has
# three expected tensors.
_MAX_EXPERTS = 1 << 18


def read_target(
    path: Path,
    *,
    strict: bool,
    mla: bool = True,
    dsa: bool | None = None,
    own_draft: bool = False,
) -> TargetCheckpoint:
    """Read the headers of the checkpoint at ``path`` without loading weights.

    Latents (mla_kv.safetensors) replace keys and values, unless ``mla`` is false. ``dsa`` selects
    whether indexers are used; with None the config decides. Unused MTP layers cause a warning,
    unless ``own_draft`` drafts with them. Raises SpecbuildError if the checkpoint is missing,
    unsupported, or has other tensors than its configuration requires. ``strict`` also rejects
    unknown fields.
    """
    path = Path(path)
    source = open_target(path, gguf_forms())
    config = source.config
    family = _family(source)
    form = family.checkpoint
    geometry, warnings = form.read_config(path, config, strict=strict)
    warnings = source.warnings + warnings
    _check_sizes(config, geometry)
    if not family.retrofits:
        _refuse_retrofits(path, geometry, mla=mla, dsa=dsa)
    if not geometry.eos_token_ids:
        warnings += ("target: no EOS token is defined; output ends only at its maximum length",)
    floats = float_tensors(source.tensors(), config, strict=strict)
    warnings += floats.warnings
    own_tensors, predicting = split_predictors(floats.tensors, geometry.layers, config)
    if not own_draft:
        warnings += unused_predictors(predicting)
    tensors, name_warnings = form.canonical(own_tensors, geometry, config)
    if geometry.tied_head:
        tie_head(path, tensors)
    names = list(tensors)
    hints = [*_draft_hints(names), *form.hints(geometry, names)]
    hints += _foreign_hints(config, names, excluded=family)
    expected = form.tensors(geometry)
    warnings += drop_zero_biases(tensors, expected)
    audit(str(path), expected, tensors, hints)
    roots = form.text_roots(path, config)
    generation, generation_warnings = source.generation(roots)
    target = TargetCheckpoint(
        geometry,
        form.for_engine(tensors, geometry, config),
        warnings + name_warnings + generation_warnings,
        source.text_files(roots),
        source_types=source.source_types or floats.types,
        generation=generation,
        quantization=floats.quantization,
    )
    if not family.retrofits:
        return target
    return _with_retrofits(path, config, target, strict=strict, mla=mla, dsa=dsa)


def read_draft(
    path: Path,
    target: TargetGeometry,
    *,
    strict: bool,
    norm_output: Literal["state", "head"] | None = None,
) -> DraftCheckpoint:
    """Read the draft at ``path``; of its weights only vocabulary maps are loaded.

    ``norm_output`` is the meaning of the config's flag of this name; None means unspecified. Raises
    SpecbuildError if the draft is unsupported, has other tensors than required, or does not fit
    ``target``.
    """
    path = Path(path)
    fields = with_modelopt(path, read_config(path))
    config = Config(str(path / "config.json"), DRAFT_LABEL, fields)
    for family in DRAFTS.values():
        if family.claims(config):
            return family.read(path, config, target, strict=strict, norm_output=norm_output)
    architectures = config.texts("architectures")
    drafts = {name: draft for draft in DRAFTS.values() for name in draft.architectures}
    for name in architectures:
        if name in drafts:
            return drafts[name].read(path, config, target, strict=strict, norm_output=norm_output)
    for model in TARGETS.values():
        if model.model_types.get(config.text("model_type") or "") in architectures:
            raise SpecbuildError(
                f"{path}: is a {model.title} target, not a draft; pass it with --model"
            )
    supported = "; ".join(f"{d.title}: {', '.join(d.architectures)}" for d in DRAFTS.values())
    raise SpecbuildError(
        f"{config.where}: architectures: got {list(architectures)!r}, expected a supported "
        f"draft ({supported})"
    )


def read_own_draft(
    path: Path,
    target: TargetGeometry,
    *,
    strict: bool,
    norm_output: Literal["state", "head"] | None = None,
) -> DraftCheckpoint:
    """Read the MTP layer of a target's checkpoint as a draft. SpecbuildError if it has none."""
    if is_gguf(path):
        raise SpecbuildError(
            f"--draft {OWN_DRAFT}: MTP layers of GGUF files such as {path} are not supported; use "
            "the directory with the model's safetensors"
        )
    config = open_target(path, gguf_forms()).config
    return DRAFTS[OWN_DRAFT].read(path, config, target, strict=strict, norm_output=norm_output)


def is_own_draft(draft: Path | None) -> bool:
    """Return whether ``--draft`` names the target's MTP layer and no such directory exists."""
    return draft is not None and str(draft) == OWN_DRAFT and not draft.is_dir()


def _check_sizes(config: Config, geometry: TargetGeometry) -> None:
    """Raise SpecbuildError if an engine's manifest cannot represent the geometry."""
    try:
        check_target(geometry)
    except EngineFileError as error:
        raise SpecbuildError(f"{config.where}: {error}; correct the sizes in the file") from error
    experts = 0 if geometry.moe is None else geometry.moe.experts
    if geometry.layers * experts > _MAX_EXPERTS:
        raise SpecbuildError(
            f"{config.where}: got {geometry.layers} layers of {experts} experts, expected up to "
            f"{_MAX_EXPERTS} experts in all; correct the sizes in the file"
        )


def _family(source: OpenedTarget) -> TargetFamily:
    config = source.config
    model_type, architectures = config.text("model_type"), config.texts("architectures")
    got = f"model_type {model_type!r}"
    for family in TARGETS.values():
        if family.checkpoint.claims(config):
            return family
        architecture = family.model_types.get(model_type or "")
        if architecture is not None:
            if not architectures or architecture in architectures:
                return family
            got = f"architectures {list(architectures)!r}"
    names: list[str] = []
    with suppress(SpecbuildError):  # the model is rejected anyway; the names are only for hints
        names = list(source.tensors())
    hints = [*_draft_hints(names), *_foreign_hints(config, names)]
    lines = [f"{config.where}: {got} is not supported (supported: {supported_targets()})"]
    raise SpecbuildError("\n".join([*lines, *[f"  hint: {hint}" for hint in hints]]))


def _draft_hints(names: Iterable[str]) -> list[str]:
    return [hint for draft in DRAFTS.values() for hint in draft.hints(names)]


def _foreign_hints(
    config: Config, names: list[str], *, excluded: TargetFamily | None = None
) -> list[str]:
    """Return hints about other families with such tensors."""
    others = [family for family in TARGETS.values() if family is not excluded]
    return [hint for family in others for hint in family.checkpoint.foreign_hints(config, names)]


def read_retrofit_target(path: Path, *, command: str, mla: bool) -> TargetCheckpoint:
    """Read a target for which ``command`` computes latents or indexers; ``mla`` reads its latents.

    Raises SpecbuildError for a GGUF file, and for a family that supports neither.
    """
    refuse_gguf(path)
    target = read_target(path, strict=False, mla=mla, dsa=False)
    kind = target.geometry.model_type
    if not target_family(kind).retrofits:
        detail = ", which already caches latents" if target.geometry.latent_dims else ""
        raise SpecbuildError(
            f"{path}: is a {kind}{detail}; {command} supports only {retrofit_targets()}"
        )
    return target


def _refuse_retrofits(path: Path, geometry: TargetGeometry, *, mla: bool, dsa: bool | None) -> None:
    kind, families = geometry.model_type, retrofit_targets()
    if mla and has_file(path / LATENT_FILE):
        detail = ", which caches native latents" if geometry.latent_dims else ""
        raise SpecbuildError(
            f"{path / LATENT_FILE}: latents in place of keys and values need {families}, but this "
            f"is a {kind}{detail}; remove the file, or build with --no-mla"
        )
    if dsa:
        raise SpecbuildError(
            f"--dsa: indexers ({INDEXER_FILE}) need {families}, but {path} is a {kind}; remove "
            "the option"
        )


def _with_retrofits(
    path: Path,
    config: Config,
    target: TargetCheckpoint,
    *,
    strict: bool,
    mla: bool,
    dsa: bool | None,
) -> TargetCheckpoint:
    """Add the latents and indexers in the checkpoint's directory."""
    geometry, tensors = target.geometry, target.tensors
    warnings = target.warnings + check_fields(config.section("attention"), ATTENTION, strict=strict)
    latents = read_latents(path, config, geometry) if mla else None
    if latents is not None:
        if not geometry.attention.qkv_bias:
            raise SpecbuildError(
                f"{path / LATENT_FILE}: latents need a model with attention biases "
                "(attention_bias); remove the file, or build with --no-mla"
            )
        geometry = dataclasses.replace(geometry, latent_dims=latents.dims)
        tensors = {**tensors, **latents.tensors}
        warnings += latents.warnings
    indexers, indexer_warnings = read_indexers(path, config, geometry, asked=dsa)
    if indexers is not None:
        geometry = dataclasses.replace(geometry, indexer=indexers.geometry)
        tensors = {**tensors, **indexers.tensors}
    return dataclasses.replace(
        target,
        geometry=geometry,
        tensors=tensors,
        warnings=warnings + indexer_warnings,
        replaced=latents.replaced if latents is not None else {},
    )
