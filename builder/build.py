"""``specbuild build``: read, export, lower, write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx_ir as ir
import torch

from specbuild.builder import graphs
from specbuild.builder.backends.backend import (
    Lowered,
    LoweringRun,
    lower_cpu,
    lower_cuda,
    lower_tensorrt_rtx,
)
from specbuild.builder.backends.cuda.compile.nvrtc import supported_gpu
from specbuild.builder.backends.cuda.report import CudaReport
from specbuild.builder.backends.cuda.support import (
    batch_warnings,
    require_cuda_options,
    require_cuda_support,
)
from specbuild.builder.backends.cuda.tactics.tactic_book import given_tactics
from specbuild.builder.backends.tensorrt.build_plans import RoleReport
from specbuild.builder.backends.tensorrt.capabilities import (
    require_standard_support,
    require_tensorrt_options,
    tensorrt_device,
)
from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.target_parts import TEXT_FILES, TargetCheckpoint
from specbuild.builder.engine.dsa import dsa_warnings
from specbuild.builder.engine.manifest import BuiltParts, engine_manifest, graph_file
from specbuild.builder.engine.sizes import (
    KERNEL_BACKENDS,
    EnginePlan,
    context_warnings,
    plan_engine,
    windowed_draft,
)
from specbuild.builder.engine.writer import (
    EngineFolder,
    json_bytes,
    require_replaceable,
    require_space,
    staged_engine,
    weight_bytes,
)
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.graph.passes.metadata import clear_metadata
from specbuild.builder.graph.passes.pipeline import PassResult
from specbuild.builder.graph.passes.portable import portable_bytes
from specbuild.builder.graph.weight_sources import WeightSources
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import Progress
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.geometry import Eagle3Geometry
from specbuild.runtime.errors import EngineFileError, SpecbuildError
from specbuild.runtime.text import TextCodec

_REPORT_FILE = "build_report.json"


@dataclass(frozen=True)
class BuildReport:
    """What a build did: passes by role, bytes written, and what a GPU will run.

    ``draft_dtype`` is how the draft's weights are stored.

    Equal for equal builds.
    """

    passes: tuple[PassResult, ...]
    weight_bytes: int
    graph_bytes: dict[str, int]
    warnings: tuple[str, ...]
    draft_dtype: str | None = None
    cuda: CudaReport | None = None
    tensorrt: dict[str, RoleReport] = field(default_factory=dict)


Checkpoints = tuple[TargetCheckpoint, DraftCheckpoint | None]


def build(
    options: BuildOptions, progress: Progress, *, checkpoints: Checkpoints | None = None
) -> BuildReport:
    """Builds the engine directory ``options.output``.

    ``checkpoints`` stand for what ``options.model`` and ``options.draft`` would be read as.
    Raises SpecbuildError for a wrong option, checkpoint or disk; nothing is left behind then.
    """
    output = options.output.resolve()
    device = _device(options)
    kernels = options.kernels
    tactics = None if kernels.tactics is None else given_tactics(kernels.tactics, device)
    _require_apart(options, output)
    if options.dump_passes is not None and options.dump_passes.is_file():
        raise SpecbuildError(f"--dump-passes {options.dump_passes} is a file; give a directory")
    require_replaceable(output, force=options.force)
    target, draft, plan = _settled(options, checkpoints or _read(options, progress))
    warnings = (*target.warnings, *(draft.warnings if draft else ()))
    for warning in warnings:
        progress.note(f"warning: {warning}")
    _require_readable(target.text_files)
    sources = WeightSources(target, draft)
    models = _export(sources, plan, _activations(options, sources), progress)
    portable = _portable(models) if options.keep_onnx else {}
    run = LoweringRun(device, options.dump_passes, progress, tactics, kernels.tuned_only)
    lowered = _lowered(options, models, plan, sources, run)
    size = weight_bytes(lowered.weights)
    progress.note(f"the engine stores {size / 1e6:.1f} MB of weights")
    # Beside an engine that holds its weights they lie in a file while it is built.
    held = lowered.make_plans is not None and not lowered.weights_beside
    require_space(output.parent, 2 * size if held else size)
    report = BuildReport(
        passes=lowered.passes,
        weight_bytes=size,
        graph_bytes={
            graph_file(role): len(lowered.files[graph_file(role)])
            for role in lowered.models
            if graph_file(role) in lowered.files
        },
        warnings=warnings,
        draft_dtype=draft.geometry.dtype if draft else None,
        cuda=lowered.cuda,
    )
    stored = {} if held else lowered.weights
    parts = BuiltParts(target, draft, lowered.plan, lowered.models, stored, warnings, device)
    with staged_engine(output, force=options.force) as folder:
        if lowered.make_plans is not None:
            plans, reports = lowered.make_plans(folder)
            parts = replace(parts, plans=plans, device=",".join(plans.build.compute_capabilities))
            report = replace(report, tensorrt=reports)
        _write(folder, parts, {**portable, **lowered.files}, report, progress)
        progress.start("reading back", 1, "step")
        folder.seal(engine_manifest(options, parts, folder.stored_files()))
    return report


def _lowered(
    options: BuildOptions,
    models: dict[str, ir.Model],
    plan: EnginePlan,
    sources: WeightSources,
    run: LoweringRun,
) -> Lowered:
    """What the backend makes of the portable graphs."""
    if options.backend == "cuda":
        return lower_cuda(models, plan, sources, run)
    if options.backend == "tensorrt":
        from specbuild.builder.backends.tensorrt.plugins.target import lower_plugins

        lowered: Lowered = lower_plugins(models, plan, sources, options, run)
        return lowered
    if options.backend == "tensorrt-rtx":
        return lower_tensorrt_rtx(models, plan, options, run)
    return lower_cpu(models, plan, run)


def _device(options: BuildOptions) -> str:
    """What the engine is built for: ``cpu``, or the GPU architectures."""
    require_tensorrt_options(options)
    if facts_of(options.backend).has_engines:
        return tensorrt_device(options)
    if options.backend == "cuda":
        return supported_gpu(options.gpu)
    kernels = options.kernels
    for name, given in (("gpu", options.gpu), ("tactics", kernels.tactics)):
        if given is not None:
            raise SpecbuildError(f"--{name} {given} needs --backend cuda")
    if kernels.tuned_only:
        raise SpecbuildError("--tuned-only needs --backend cuda")
    if options.drafting.dtype is not None:
        raise SpecbuildError(f"--draft-dtype {options.drafting.dtype} needs --backend cuda")
    return options.backend


def _require_apart(options: BuildOptions, output: Path) -> None:
    """Nothing that the build reads, or writes beside the engine, may lie where the engine goes."""
    beside = (options.dump_passes, options.kernels.tactics, options.tensorrt.timing_cache)
    for kept in (options.model, options.draft, *beside):
        if kept is not None and output in (kept.resolve(), *kept.resolve().parents):
            raise SpecbuildError(
                f"--output {options.output} would replace {kept}; choose another place"
            )


def _read(options: BuildOptions, progress: Progress) -> Checkpoints:
    progress.start("reading checkpoints", 1, "step")
    target = read_target(
        options.model, strict=options.strict, mla=not options.no_mla, dsa=options.dsa.enabled
    )
    if options.draft is None:
        return target, None
    return target, read_draft(options.draft, target.geometry, strict=options.strict)


def _settled(
    options: BuildOptions, checkpoints: Checkpoints
) -> tuple[TargetCheckpoint, DraftCheckpoint | None, EnginePlan]:
    """The checkpoints and the sizes that the options give them."""
    target, draft = checkpoints
    dtype = options.drafting.dtype
    if draft is None and dtype is not None:
        raise SpecbuildError(f"--draft-dtype {dtype} needs a draft; add --draft")
    if draft is not None:
        draft = replace(draft, geometry=_stored_draft(draft.geometry, options))
    geometry = draft.geometry if draft else None
    if options.backend in KERNEL_BACKENDS:
        require_cuda_support(target.geometry, geometry)
    if options.backend == "tensorrt-rtx":
        require_standard_support(target.geometry, options)
    plan = plan_engine(options, target.geometry, geometry)
    if options.backend in KERNEL_BACKENDS:
        require_cuda_options(plan, options.backend)
    unused = dsa_warnings(plan.dsa, max_seq_len=plan.limits.max_seq_len)
    target = replace(target, warnings=(*target.warnings, *unused))
    if draft is not None and geometry is not None:
        said = context_warnings(geometry, plan.limits) + batch_warnings(plan, options.backend)
        draft = replace(draft, warnings=(*draft.warnings, *said))
    return target, draft, plan


def _stored_draft(draft: Eagle3Geometry, options: BuildOptions) -> Eagle3Geometry:
    """The draft with what the options say of its window and of its weights' type."""
    windowed = windowed_draft(draft, options)
    if options.backend != "cpu":
        return replace(windowed, dtype=options.drafting.dtype or "bf16")
    return replace(windowed, dtype="fp32")


def _activations(options: BuildOptions, sources: WeightSources) -> torch.dtype:
    """The type of the portable graphs: the checkpoint's, or what a GPU's kernels take."""
    return sources.activations if options.backend == "cpu" else torch.bfloat16


def _export(
    sources: WeightSources, plan: EnginePlan, dtype: torch.dtype, progress: Progress
) -> dict[str, ir.Model]:
    """The portable graph of every role, its weights bound to the checkpoints."""
    g, d = sources.target_geometry, sources.draft_geometry
    progress.start("exporting graphs", 3 if d else 1, "graph")
    models = {"target": graphs.target_graph(g, plan, d.aux_layers if d else (), dtype)}
    progress.advance(1)
    if d is not None:
        models["draft_fuse"] = graphs.draft_fuse_graph(d, g, dtype)
        progress.advance(1)
        models["draft"] = graphs.draft_graph(d, g, plan, dtype)
        progress.advance(1)
    for model in models.values():
        sources.bind(model)
    if d is not None:
        models["expand"] = graphs.expand_graph(d, sources)
        models["commit"] = graphs.commit_graph(plan, dtype)
    models |= graphs.tree_graphs(g.vocab, plan.limits.draft_depth, d is not None)
    for model in models.values():
        clear_metadata(model)
    return models


def _require_readable(files: Sequence[Path]) -> None:
    """SpecbuildError where what turns text into tokens is damaged, which a run would find out."""
    found = {file.name: file.read_bytes() for file in files}
    tokenizer, config, template = (found.get(name) for name in TEXT_FILES)
    if tokenizer is None:
        return
    try:
        TextCodec(tokenizer, config, template)
    except EngineFileError as error:
        raise SpecbuildError(f"{files[0].parent}: {error}; get the file anew") from error


def _portable(models: dict[str, ir.Model]) -> dict[str, bytes]:
    """The graphs as they are before any lowering, by file name."""
    return {f"onnx/{role}.onnx": portable_bytes(model) for role, model in models.items()}


def _write(
    folder: EngineFolder,
    parts: BuiltParts,
    files: dict[str, bytes],
    report: BuildReport,
    progress: Progress,
) -> None:
    for name, data in files.items():
        folder.write(name, data)
    for file in parts.target.text_files:
        folder.write(file.name, file.read_bytes())
    folder.write(_REPORT_FILE, json_bytes(report))
    if parts.weights:
        folder.write_weights(parts.weights, progress)
