"""What a build reads, and the sizes that options and backend settle of it."""

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
    EnginePlan,
    longest_sequence,
    plan_engine,
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
    plan: EnginePlan
    sources: WeightSources

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know of the checkpoints and the sizes."""
        several = len(self.drafts) > 1
        of_drafts = (
            f"{draft.record.kind}: {warning}" if several else warning
            for draft in self.drafts
            for warning in draft.warnings
        )
        return (*self.target.warnings, *of_drafts)

    def notes(self, options: BuildOptions) -> tuple[str, ...]:
        """What was chosen for a user who may not expect it."""
        said = []
        chosen, most = self.plan.limits.max_seq_len, self.target.geometry.max_positions
        if options.limits.max_seq_len is None and chosen < most:
            said.append(
                f"max sequence length: {chosen} tokens; the model supports {most}, which "
                "--max-seq-len sets"
            )
        if self.sources.converted:
            types = " and ".join(self.sources.converted)
            said.append(
                f"tensors of type {types} are stored as --backend {options.backend} computes; "
                "build_report.json names them"
            )
        return tuple(said)


def read_checkpoints(options: BuildOptions, progress: Progress) -> Checkpoints:
    """The target and its drafts. Raises SpecbuildError where one cannot be read.

    Loading a tensor raises it where the tensor is not finite, but with ``allow_nonfinite``.
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
    """What is built of the checkpoints, or SpecbuildError: what cannot be, and why."""
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
    plan = plan_engine(options, backend.sizes, target.geometry, by_group)
    said = backend.check_plan(plan)
    unused = dsa_warnings(plan.dsa, max_seq_len=plan.limits.max_seq_len)
    target = replace(target, warnings=(*target.warnings, *unused))
    for place, draft in enumerate(drafts):
        said = context_warnings(draft.geometry, plan.limits) + said
        drafts[place] = replace(draft, warnings=(*draft.warnings, *said))
        said = ()
    _require_readable(target.text_files)
    sources = WeightSources(target, drafts, backend.activations)
    return BuildInputs(target, tuple(drafts), plan, sources)


def _settled_ropes(options: BuildOptions, checkpoints: Checkpoints) -> Checkpoints:
    """The checkpoints with rotary embeddings for the longest sequence of the engine."""
    target, drafts = checkpoints
    longest = longest_sequence(options.limits.max_seq_len, target.geometry)
    return (
        replace(target, geometry=target.geometry.up_to(longest)),
        tuple(
            replace(d, geometry=replace(d.geometry, rope=d.geometry.rope.up_to(longest)))
            for d in drafts
        ),
    )


def _stored_draft(
    draft: DraftCheckpoint, options: BuildOptions, backend: Backend[Any]
) -> DraftCheckpoint:
    """The draft with its window, and how its weights are stored."""
    dtype = options.drafting.dtype or backend.sizes.draft_dtype
    return replace(draft, geometry=replace(windowed_draft(draft.geometry, options), dtype=dtype))


def _require_kinds(drafts: Sequence[DraftCheckpoint], facts: BackendFacts) -> None:
    """SpecbuildError for two drafts of a kind, or for several where an engine holds one."""
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
    """The target with how its projections are stored, and a warning where that is lossy."""
    if dtype is None:
        return target
    quantized = next((t for t in target.tensors.values() if t.quantized is not None), None)
    if quantized is not None and quantized.quantized is not None:
        raise SpecbuildError(
            f"--weights-dtype {dtype}: the checkpoint is quantized already ({quantized.name} is "
            f"{quantized.quantized.form.name}), and rounding it again would add an error; omit the "
            "option, or pass bf16"
        )
    said = (
        f"target: its projections and head are rounded to {dtype}, so outputs are no longer those "
        "of the checkpoint; specbuild compare says what that costs on a text",
    )
    return replace(
        target,
        geometry=replace(target.geometry, dtype=dtype),
        warnings=(*target.warnings, *said),
    )


def _require_readable(files: Sequence[TextFile]) -> None:
    """SpecbuildError where what turns text into tokens is damaged, which a run would find out."""
    found = {file.name: file.read_bytes() for file in files}
    tokenizer, config, template = (found.get(name) for name in TEXT_FILES)
    if tokenizer is None:
        return
    try:
        TextCodec(tokenizer, config, template).check_template()
    except EngineFileError as error:
        raise SpecbuildError(f"{files[0].parent}: {error}; get the file anew") from error
