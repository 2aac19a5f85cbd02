"""``specbuild build``: read, export, lower, write."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from specbuild.builder import graphs
from specbuild.builder.backends.cpu.lowering import CPU_PASSES
from specbuild.builder.checkpoint.draft import DraftCheckpoint, read_draft
from specbuild.builder.checkpoint.target import TargetCheckpoint, read_target
from specbuild.builder.config import BuildOptions
from specbuild.builder.engine_manifest import BuiltParts, engine_manifest, graph_file
from specbuild.builder.engine_writer import (
    EngineFolder,
    json_bytes,
    require_replaceable,
    require_space,
    staged_engine,
    weight_bytes,
)
from specbuild.builder.limits import EnginePlan, context_warnings, plan_engine, windowed_draft
from specbuild.builder.passes.metadata import clear_metadata
from specbuild.builder.passes.pipeline import PassResult, run_passes
from specbuild.builder.passes.portable import portable_bytes
from specbuild.builder.passes.weights import Recipe, recipe_of
from specbuild.builder.progress import Progress
from specbuild.builder.weight_sources import WeightSources
from specbuild.runtime.errors import SpecbuildError

_REPORT_FILE = "build_report.json"


@dataclass(frozen=True)
class BuildReport:
    """What a build did: passes by role, and bytes written; equal for equal builds."""

    passes: tuple[PassResult, ...]
    weight_bytes: int
    graph_bytes: dict[str, int]
    warnings: tuple[str, ...]


def build(options: BuildOptions, progress: Progress) -> BuildReport:
    """Builds the engine directory ``options.output``.

    Raises SpecbuildError for a wrong option, checkpoint or disk; nothing is left behind then.
    """
    output = options.output.resolve()
    _require_apart(options, output)
    require_replaceable(output, force=options.force)
    target, draft, plan = _read(options, progress)
    warnings = (*target.warnings, *(draft.warnings if draft else ()))
    for warning in warnings:
        progress.note(f"warning: {warning}")
    models = _export(target, draft, plan, progress)
    portable = _portable(models) if options.keep_onnx else {}
    results = _lower(models, options.dump_passes, progress)
    weights = _collect_weights(models)
    size = weight_bytes(weights)
    progress.note(f"the engine stores {size / 1e6:.1f} MB of weights (fp32)")
    require_space(output.parent, size)
    lowered = {graph_file(role): portable_bytes(model) for role, model in models.items()}
    report = BuildReport(
        tuple(results), size, {name: len(data) for name, data in lowered.items()}, warnings
    )
    parts = BuiltParts(target, draft, plan, models, weights, warnings)
    with staged_engine(output, force=options.force) as folder:
        _write(folder, parts, {**portable, **lowered}, report, progress)
        progress.start("reading back", 1, "step")
        folder.seal(engine_manifest(options, parts, folder.stored_files()))
    return report


def _require_apart(options: BuildOptions, output: Path) -> None:
    """Nothing that the build reads, or writes beside the engine, may lie where the engine goes."""
    for kept in (options.model, options.draft, options.dump_passes):
        if kept is not None and output in (kept.resolve(), *kept.resolve().parents):
            raise SpecbuildError(
                f"--output {options.output} would replace {kept}; choose another place"
            )


def _read(
    options: BuildOptions, progress: Progress
) -> tuple[TargetCheckpoint, DraftCheckpoint | None, EnginePlan]:
    progress.start("reading checkpoints", 1, "step")
    target = read_target(options.model, strict=options.strict)
    if options.draft is None:
        return target, None, plan_engine(options, target.geometry, None)
    draft = read_draft(options.draft, target.geometry, strict=options.strict)
    geometry = windowed_draft(draft.geometry, options)
    plan = plan_engine(options, target.geometry, geometry)
    warnings = (*draft.warnings, *context_warnings(geometry, plan.limits))
    return target, replace(draft, geometry=geometry, warnings=warnings), plan


def _export(
    target: TargetCheckpoint, draft: DraftCheckpoint | None, plan: EnginePlan, progress: Progress
) -> dict[str, ir.Model]:
    """The portable graph of every role, its weights bound to the checkpoints."""
    g = target.geometry
    sources = WeightSources(target, draft)
    dtype = sources.activations
    progress.start("exporting graphs", 3 if draft else 1, "graph")
    models = {"target": graphs.target_graph(g, plan, draft.geometry.taps if draft else (), dtype)}
    progress.advance(1)
    if draft is not None:
        models["draft_fuse"] = graphs.draft_fuse_graph(draft.geometry, g, dtype)
        progress.advance(1)
        models["draft"] = graphs.draft_graph(draft.geometry, g, plan, dtype)
        progress.advance(1)
    for model in models.values():
        sources.bind(model)
    if draft is not None:
        models["expand"] = graphs.expand_graph(draft.geometry, sources)
        models["commit"] = graphs.commit_graph(plan, dtype)
    models |= graphs.tree_graphs(g.vocab, plan.limits.draft_depth, draft is not None)
    for model in models.values():
        clear_metadata(model)
    return models


def _portable(models: dict[str, ir.Model]) -> dict[str, bytes]:
    """The graphs as they are before any lowering, by file name."""
    return {f"onnx/{role}.onnx": portable_bytes(model) for role, model in models.items()}


def _lower(models: dict[str, ir.Model], dump: Path | None, progress: Progress) -> list[PassResult]:
    progress.start("lowering graphs", len(models), "graph")
    results = []
    for role, model in models.items():
        results += run_passes(role, model, CPU_PASSES, dump)
        progress.advance(1)
    return results


def _collect_weights(models: dict[str, ir.Model]) -> dict[str, Recipe]:
    """Every weight that a graph names, once, in the order of first use."""
    weights: dict[str, Recipe] = {}
    for model in models.values():
        for name, value in model.graph.initializers.items():
            recipe = recipe_of(value)
            if recipe is not None and not weights.setdefault(name, recipe).describes(recipe):
                raise AssertionError(f"two graphs mean different tensors by {name}")
    return weights


def _write(
    folder: EngineFolder,
    parts: BuiltParts,
    graph_files: dict[str, bytes],
    report: BuildReport,
    progress: Progress,
) -> None:
    for name, data in graph_files.items():
        folder.write(name, data)
    for file in parts.target.text_files:
        folder.write(file.name, file.read_bytes())
    folder.write(_REPORT_FILE, json_bytes(report))
    folder.write_weights(parts.weights, progress)
