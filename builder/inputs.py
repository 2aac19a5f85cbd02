"""The inputs of a build, and the sizes that follow from options and backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbuild.builder.backends.backend import Backend
from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.finite import finite_tensors
from specbuild.builder.checkpoint.target_parts import TEXT_FILES, TargetCheckpoint, TextFile
from specbuild.builder.engine.draft_window import context_warnings, windowed_draft
from specbuild.builder.engine.dsa import dsa_warnings
from specbuild.builder.engine.sizes import (
    EngineSizes,
    compute_engine_sizes,
    longest_sequence,
)
from specbuild.builder.families.checkpoints import (
    is_own_draft,
    read_draft,
    read_own_draft,
    read_target,
)
from specbuild.builder.graph.weight_sources import WeightSources
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import Progress
from specbuild.runtime.engine_dir.backends import BackendFacts
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import EngineFileError, SpecbuildError
from specbuild.runtime.text.codec import TextCodec

Checkpoints = tuple[TargetCheckpoint, tuple[DraftCheckpoint, ...]]


@dataclass(frozen=True)
class BuildInputs:
    """The checkpoints with the geometries that are built, and the engine's sizes."""

    target: TargetCheckpoint
    drafts: tuple[DraftCheckpoint, ...]
    engine_sizes: EngineSizes
    sources: WeightSources

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings about the checkpoints and the sizes."""
        several = len(self.drafts) > 1
        of_drafts = (
            f"{draft.record.kind}: {warning}" if several else warning
            for draft in self.drafts
            for warning in draft.warnings
        )
        return (*self.target.warnings, *of_drafts)

    def notes(self, options: BuildOptions) -> tuple[str, ...]:
        """Return choices that the user may not expect."""
        notes = []
        chosen, max_positions = (
            self.engine_sizes.limits.max_seq_len,
            self.target.geometry.max_positions,
        )
        if options.limits.max_seq_len is None and chosen < max_positions:
            notes.append(
                f"max sequence length: {chosen} tokens; the model supports {max_positions}, which "
                "--max-seq-len sets"
            )
        if self.sources.converted:
            types = " and ".join(self.sources.converted)
            notes.append(
                f"tensors of type {types} are stored as --backend {options.backend} computes; "
                "build_report.json names them"
            )
        return tuple(notes)


def read_checkpoints(options: BuildOptions, progress: Progress) -> Checkpoints:
    """Return the target and its drafts. Raises SpecbuildError if one cannot be read.

    Loading a tensor raises it if the tensor is not finite, unless ``allow_nonfinite``.
    """
    progress.start("reading checkpoints", 1, "step")
    target = read_target(
        options.model,
        strict=options.strict,
        mla=not options.no_mla,
        dsa=options.dsa.enabled,
        own_draft=any(map(is_own_draft, options.drafts)),
    )
    drafts = [_read_draft(options, path, target.geometry) for path in options.drafts]
    if options.allow_nonfinite:
        return target, tuple(drafts)
    target = replace(target, tensors=finite_tensors(target.tensors))
    return target, tuple(replace(d, tensors=finite_tensors(d.tensors)) for d in drafts)


def _read_draft(options: BuildOptions, path: Path, target: TargetGeometry) -> DraftCheckpoint:
    own, norm_output = is_own_draft(path), options.drafting.norm_output
    read, where = (read_own_draft, options.model) if own else (read_draft, path)
    return read(where, target, strict=options.strict, norm_output=norm_output)


def settled_inputs(
    options: BuildOptions, backend: Backend[Any], checkpoints: Checkpoints
) -> BuildInputs:
    """Return what is built from the checkpoints; SpecbuildError states what cannot be built."""
    target, read = _settled_ropes(options, checkpoints)
    dtype = options.drafting.dtype
    if not read and dtype is not None:
        raise SpecbuildError(f"--draft-dtype {dtype} needs a draft; add --draft")
    _require_kinds(read, backend.facts)
    drafts = [_stored_draft(draft, options, backend) for draft in read]
    target = _coded_target(target, options.kernels.rounds_to)
    backend.check(options, target.geometry, None)
    for draft in drafts:
        backend.check(options, target.geometry, draft.geometry)
    by_group = {draft.cache_group(i): draft.geometry for i, draft in enumerate(drafts)}
    engine_sizes = compute_engine_sizes(options, backend.sizes, target.geometry, by_group)
    notes = backend.check_engine_sizes(engine_sizes)
    unused = dsa_warnings(engine_sizes.dsa, max_seq_len=engine_sizes.limits.max_seq_len)
    target = replace(target, warnings=(*target.warnings, *unused))
    for place, draft in enumerate(drafts):
        notes = context_warnings(draft.geometry, engine_sizes.limits) + notes
        drafts[place] = replace(draft, warnings=(*draft.warnings, *notes))
        notes = ()
    _require_readable(target.text_files)
    sources = WeightSources(target, drafts, backend.activations)
    return BuildInputs(target, tuple(drafts), engine_sizes, sources)


def _settled_ropes(options: BuildOptions, checkpoints: Checkpoints) -> Checkpoints:
    """Return the checkpoints with rotary embeddings for the engine's longest sequence."""
    target, drafts = checkpoints
    longest = longest_sequence(options.limits.max_seq_len, target.geometry)
    return (
        replace(target, geometry=target.geometry.up_to(longest)),
        tuple(replace(d, geometry=d.geometry.up_to(longest)) for d in drafts),
    )


def _stored_draft(
    draft: DraftCheckpoint, options: BuildOptions, backend: Backend[Any]
) -> DraftCheckpoint:
    """Return the draft with its window, and the storage of its weights."""
    dtype = options.drafting.dtype or backend.sizes.draft_dtype
    return replace(draft, geometry=replace(windowed_draft(draft.geometry, options), dtype=dtype))


def _require_kinds(drafts: Sequence[DraftCheckpoint], facts: BackendFacts) -> None:
    """Raise SpecbuildError for two drafts of one kind, or for several if only one is supported."""
    kinds = [draft.record.kind for draft in drafts]
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if twice is not None:
        raise SpecbuildError(
            f"--draft is given twice for {twice}: runs ask for a draft by its kind, so an engine "
            "holds one of each; leave one out"
        )
    if len(kinds) > 1 and facts.has_engines:
        raise SpecbuildError(
            f"--draft is given for {' and '.join(kinds)}: an engine for {facts.title} holds one "
            "draft model; leave the others out, or build with --backend cpu or cuda"
        )


def _coded_target(target: TargetCheckpoint, dtype: str | None) -> TargetCheckpoint:
    """Return the target with the storage of its projections; warn if that is lossy."""
    if dtype is None:
        return target
    quantized = next((t for t in target.tensors.values() if t.quantized is not None), None)
    if quantized is not None and quantized.quantized is not None:
        raise SpecbuildError(
            f"--weights-dtype {dtype}: the checkpoint is quantized already ({quantized.name} is "
            f"{quantized.quantized.form.name}), and rounding it again would add an error; omit the "
            "option, or pass bf16"
        )
    notes = (
        f"target: its projections and head are rounded to {dtype}, so outputs are no longer those "
        "of the checkpoint; specbuild compare says what that costs on a text",
    )
    return replace(
        target,
        geometry=replace(target.geometry, dtype=dtype),
        warnings=(*target.warnings, *notes),
    )


def _require_readable(files: Sequence[TextFile]) -> None:
    """Raise SpecbuildError if the tokenizer's files are damaged, which a run would report later."""
    contents = {file.name: file.read_bytes() for file in files}
    tokenizer, config, template = (contents.get(name) for name in TEXT_FILES)
    if tokenizer is None:
        return
    try:
        TextCodec(tokenizer, config, template).check_template()
    except EngineFileError as error:
        raise SpecbuildError(f"{files[0].parent}: {error}; get the file anew") from error
