"""What a build reads, and the sizes that options and backend settle of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specbuild.builder.backends.backend import Backend
from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.finite import finite_tensors
from specbuild.builder.checkpoint.target_parts import TEXT_FILES, TargetCheckpoint, TextFile
from specbuild.builder.engine.draft_window import context_warnings, windowed_draft
from specbuild.builder.engine.dsa import dsa_warnings
from specbuild.builder.engine.sizes import (
    EnginePlan,
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
from specbuild.runtime.errors import EngineFileError, SpecbuildError
from specbuild.runtime.text.codec import TextCodec

Checkpoints = tuple[TargetCheckpoint, DraftCheckpoint | None]


@dataclass(frozen=True)
class BuildInputs:
    """The checkpoints with the geometries that are built, and the engine's sizes."""

    target: TargetCheckpoint
    draft: DraftCheckpoint | None
    plan: EnginePlan
    sources: WeightSources

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know of the checkpoints and the sizes."""
        return (*self.target.warnings, *(self.draft.warnings if self.draft else ()))

    def notes(self, options: BuildOptions) -> tuple[str, ...]:
        """What was chosen for a user who may not expect it."""
        said = []
        chosen, most = self.plan.limits.max_seq_len, self.target.geometry.max_positions
        if options.limits.max_seq_len is None and chosen < most:
            said.append(
                f"longest sequence: {chosen} tokens of the model's {most}; --max-seq-len N asks "
                "for more, up to all"
            )
        if self.sources.converted:
            types = " and ".join(self.sources.converted)
            said.append(
                f"tensors of type {types} are stored as --backend {options.backend} computes; "
                "build_report.json names them"
            )
        return tuple(said)


def read_checkpoints(options: BuildOptions, progress: Progress) -> Checkpoints:
    """The target and its draft. Raises SpecbuildError where one cannot be read.

    Loading a tensor raises it where the tensor is not finite, but with ``allow_nonfinite``.
    """
    progress.start("reading checkpoints", 1, "step")
    own_draft = is_own_draft(options.draft)
    target = read_target(
        options.model,
        strict=options.strict,
        mla=not options.no_mla,
        dsa=options.dsa.enabled,
        own_draft=own_draft,
    )
    draft, norm_output = None, options.drafting.norm_output
    if own_draft:
        draft = read_own_draft(
            options.model, target.geometry, strict=options.strict, norm_output=norm_output
        )
    elif options.draft is not None:
        draft = read_draft(
            options.draft, target.geometry, strict=options.strict, norm_output=norm_output
        )
    if options.allow_nonfinite:
        return target, draft
    target = replace(target, tensors=finite_tensors(target.tensors))
    if draft is not None:
        draft = replace(draft, tensors=finite_tensors(draft.tensors))
    return target, draft


def settled_inputs(
    options: BuildOptions, backend: Backend[Any], checkpoints: Checkpoints
) -> BuildInputs:
    """What is built of the checkpoints, or SpecbuildError: what cannot be, and why."""
    target, draft = checkpoints
    dtype = options.drafting.dtype
    if draft is None and dtype is not None:
        raise SpecbuildError(f"--draft-dtype {dtype} needs a draft; add --draft")
    if draft is not None:
        stored = dtype or backend.sizes.draft_dtype
        draft = replace(
            draft, geometry=replace(windowed_draft(draft.geometry, options), dtype=stored)
        )
    target = _coded_target(target, options.kernels.weights_dtype)
    geometries = target.geometry, draft.geometry if draft else None
    backend.check(options, *geometries)
    plan = plan_engine(options, backend.sizes, *geometries)
    said = backend.check_plan(plan)
    unused = dsa_warnings(plan.dsa, max_seq_len=plan.limits.max_seq_len)
    target = replace(target, warnings=(*target.warnings, *unused))
    if draft is not None:
        said = context_warnings(draft.geometry, plan.limits) + said
        draft = replace(draft, warnings=(*draft.warnings, *said))
    _require_readable(target.text_files)
    return BuildInputs(target, draft, plan, WeightSources(target, draft, backend.activations))


def _coded_target(target: TargetCheckpoint, dtype: str | None) -> TargetCheckpoint:
    """The target with how its projections are stored, and a warning where that is lossy."""
    if dtype is None or dtype == "bf16":
        return target
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
