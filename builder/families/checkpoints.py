"""Reads the checkpoints of targets and drafts, of whatever family they are."""

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
    retrofitted,
    supported_targets,
    target_family,
)
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.geometry_check import check_target
from specbuild.runtime.errors import EngineFileError, SpecbuildError

# What --draft says for the MTP layer of the target's own checkpoint.
OWN_DRAFT = next(name for name, family in DRAFTS.items() if family.in_target)
DRAFT_LABEL = "draft config.json"
# Of all layers together; the largest models have a tenth of it. Each is three expected tensors.
_MAX_EXPERTS = 1 << 18


def read_target(
    path: Path,
    *,
    strict: bool,
    mla: bool = True,
    dsa: bool | None = None,
    own_draft: bool = False,
) -> TargetCheckpoint:
    """Read the headers of the checkpoint at ``path``; no weights are loaded.

    Latents that lie beside it take the place of keys and values, unless ``mla`` is false. Indexers
    are used where ``dsa`` asks for them, or the config where it is None. Of layers that predict
    further tokens a warning says that they are left out, but where they draft (``own_draft``).
    Raises SpecbuildError if it is no checkpoint, is of an unsupported kind, or does not hold
    exactly the tensors that its configuration asks for; ``strict`` also refuses unknown fields.
    """
    path = Path(path)
    opened = open_target(path, gguf_forms())
    config = opened.config
    family = _family(opened)
    form = family.checkpoint
    geometry, warnings = form.read_config(path, config, strict=strict)
    warnings = opened.warnings + warnings
    _check_sizes(config, geometry)
    if not family.retrofits:
        _refuse_retrofits(path, geometry, mla=mla, dsa=dsa)
    if not geometry.eos_token_ids:
        warnings += ("target: no EOS token is named; output ends at its length only",)
    floats = float_tensors(opened.tensors(), config, strict=strict)
    warnings += floats.warnings
    own, predicting = split_predictors(floats.tensors, geometry.layers, config)
    if not own_draft:
        warnings += unused_predictors(predicting)
    tensors, more = form.canonical(own, geometry, config)
    if geometry.tied_head:
        tie_head(path, tensors)
    names = list(tensors)
    hints = [*_draft_hints(names), *form.hints(geometry, names)]
    hints += _foreign_hints(config, names, but=family)
    expected = form.tensors(geometry)
    warnings += drop_zero_biases(tensors, expected)
    audit(str(path), expected, tensors, hints)
    roots = form.text_roots(path, config)
    generation, unusable = opened.generation(roots)
    target = TargetCheckpoint(
        geometry,
        form.for_engine(tensors, geometry, config),
        warnings + more + unusable,
        opened.text_files(roots),
        source_types=opened.source_types or floats.types,
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
    """Read the draft at ``path``; of the weights only maps of its vocabulary are loaded.

    ``norm_output`` is what its config's flag of this name means, None where nobody said it.
    Raises SpecbuildError if it is no draft, needs what is not implemented, does not hold exactly
    the tensors that it should, or does not fit ``target``.
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
                f"{path}: is a {model.title} target, not a draft; give it with --model"
            )
    known = "; ".join(f"{d.title}: {', '.join(d.architectures)}" for d in DRAFTS.values())
    raise SpecbuildError(
        f"{config.where}: architectures {list(architectures)!r} is no draft that specbuild knows "
        f"(supported: {known})"
    )


def read_own_draft(
    path: Path,
    target: TargetGeometry,
    *,
    strict: bool,
    norm_output: Literal["state", "head"] | None = None,
) -> DraftCheckpoint:
    """The layer of a target's own checkpoint that drafts. SpecbuildError where there is none."""
    if is_gguf(path):
        raise SpecbuildError(
            f"--draft {OWN_DRAFT}: MTP layers are not read of GGUF files such as {path}; give the "
            "directory of the model's safetensors"
        )
    config = open_target(path, gguf_forms()).config
    return DRAFTS[OWN_DRAFT].read(path, config, target, strict=strict, norm_output=norm_output)


def is_own_draft(draft: Path | None) -> bool:
    """Whether ``--draft`` asks for the target's own layer, by its name: no directory has it."""
    return draft is not None and str(draft) == OWN_DRAFT and not draft.is_dir()


def _check_sizes(config: Config, geometry: TargetGeometry) -> None:
    """Raise SpecbuildError where an engine's manifest could not hold the geometry."""
    try:
        check_target(geometry)
    except EngineFileError as error:
        raise SpecbuildError(f"{config.where}: {error}; correct the sizes in the file") from error
    experts = 0 if geometry.moe is None else geometry.moe.experts
    if geometry.layers * experts > _MAX_EXPERTS:
        raise SpecbuildError(
            f"{config.where}: {geometry.layers} layers of {experts} experts are more than "
            f"{_MAX_EXPERTS} in all; correct the sizes in the file"
        )


def _family(opened: OpenedTarget) -> TargetFamily:
    config = opened.config
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
    with suppress(SpecbuildError):  # the model is refused anyway; the names only make hints
        names = list(opened.tensors())
    hints = [*_draft_hints(names), *_foreign_hints(config, names)]
    lines = [f"{config.where}: {got} is not supported (supported: {supported_targets()})"]
    raise SpecbuildError("\n".join([*lines, *[f"  hint: {hint}" for hint in hints]]))


def _draft_hints(names: Iterable[str]) -> list[str]:
    return [hint for draft in DRAFTS.values() for hint in draft.hints(names)]


def _foreign_hints(
    config: Config, names: list[str], *, but: TargetFamily | None = None
) -> list[str]:
    """Which other families the tensors look like."""
    others = [family for family in TARGETS.values() if family is not but]
    return [hint for family in others for hint in family.checkpoint.foreign_hints(config, names)]


def read_retrofit_target(path: Path, *, command: str, mla: bool) -> TargetCheckpoint:
    """Read a target that ``command`` computes latents or indexers for; ``mla`` reads its latents.

    Raises SpecbuildError for a GGUF file, and for a family without latents and indexers.
    """
    refuse_gguf(path)
    target = read_target(path, strict=False, mla=mla, dsa=False)
    kind = target.geometry.model_type
    if not target_family(kind).retrofits:
        own = ", which caches latents already" if target.geometry.latent_dims else ""
        raise SpecbuildError(f"{path}: is a {kind}{own}; {command} is for {retrofitted()}")
    return target


def _refuse_retrofits(path: Path, geometry: TargetGeometry, *, mla: bool, dsa: bool | None) -> None:
    kind, families = geometry.model_type, retrofitted()
    if mla and has_file(path / LATENT_FILE):
        own = ", which caches latents of its own" if geometry.latent_dims else ""
        raise SpecbuildError(
            f"{path / LATENT_FILE}: latents in the place of keys and values belong to {families}, "
            f"but this is a {kind}{own}; remove the file, or build with --no-mla"
        )
    if dsa:
        raise SpecbuildError(
            f"--dsa: indexers ({INDEXER_FILE}) are built for {families}, {path} is a {kind}; "
            "leave it out"
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
    """The checkpoint with the latents and indexers that lie beside it."""
    geometry, tensors = target.geometry, target.tensors
    warnings = target.warnings + check_fields(config.section("attention"), ATTENTION, strict=strict)
    latents = read_latents(path, config, geometry) if mla else None
    if latents is not None:
        if not geometry.attention.qkv_bias:
            raise SpecbuildError(
                f"{path / LATENT_FILE}: latents are built beside biases of attention, which this "
                "model has not (attention_bias); remove the file, or build with --no-mla"
            )
        geometry = dataclasses.replace(geometry, latent_dims=latents.dims)
        tensors = {**tensors, **latents.tensors}
        warnings += latents.warnings
    indexers, more = read_indexers(path, config, geometry, asked=dsa)
    if indexers is not None:
        geometry = dataclasses.replace(geometry, indexer=indexers.geometry)
        tensors = {**tensors, **indexers.tensors}
    return dataclasses.replace(
        target,
        geometry=geometry,
        tensors=tensors,
        warnings=warnings + more,
        replaced=latents.replaced if latents is not None else {},
    )
