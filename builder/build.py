"""``specbuild build``: read, export, lower, write."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from specbuild.builder import graphs
from specbuild.builder.backends.cpu.lowering import CPU_PASSES
from specbuild.builder.checkpoint.draft import DraftCheckpoint, read_draft
from specbuild.builder.checkpoint.target import TargetCheckpoint, read_target
from specbuild.builder.config import BuildOptions
from specbuild.builder.durable import write_bytes
from specbuild.builder.engine_writer import (
    json_bytes,
    require_space,
    seal,
    staged_directory,
    stored_files,
    weight_bytes,
    write_weights,
)
from specbuild.builder.limits import EnginePlan, context_warnings, plan_engine, windowed_draft
from specbuild.builder.passes.metadata import clear_metadata
from specbuild.builder.passes.pipeline import PassResult, run_passes
from specbuild.builder.passes.portable import portable_proto, save_portable
from specbuild.builder.passes.weights import Recipe, recipe_of
from specbuild.builder.progress import Progress
from specbuild.builder.weight_sources import WeightSources
from specbuild.runtime import FORMAT_VERSION
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.manifest import (
    WEIGHTS_FILE,
    Manifest,
    Port,
    Role,
    StoredTensor,
)

_REPORT_FILE = "build_report.json"


@dataclass(frozen=True)
class BuildReport:
    """What a build did: passes by role, and bytes written; equal for equal builds."""

    passes: tuple[PassResult, ...]
    weight_bytes: int
    graph_bytes: dict[str, int]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Parts:
    """What a build has settled by the time that the manifest is written."""

    target: TargetCheckpoint
    draft: DraftCheckpoint | None
    plan: EnginePlan
    models: dict[str, ir.Model]
    weights: dict[str, Recipe]


def build(options: BuildOptions, progress: Progress) -> BuildReport:
    """Builds the engine directory ``options.output``.

    Raises SpecbuildError for a wrong option, checkpoint or disk; nothing is left behind then.
    """
    if options.output.exists() and not options.force:
        raise SpecbuildError(f"{options.output} exists; remove it or pass --force")
    progress.start("reading checkpoints", 1, "step")
    target = read_target(options.model, strict=options.strict)
    draft = (
        None
        if options.draft is None
        else read_draft(options.draft, target.geometry, strict=options.strict)
    )
    if draft is not None:
        draft = replace(draft, geometry=windowed_draft(draft.geometry, options))
    plan = plan_engine(options, target.geometry, draft.geometry if draft else None)
    if draft is not None:
        beyond = context_warnings(draft.geometry, plan.limits)
        draft = replace(draft, warnings=(*draft.warnings, *beyond))
    warnings = (*target.warnings, *(draft.warnings if draft else ()))
    for warning in warnings:
        progress.note(f"warning: {warning}")

    models = _export(target, draft, plan, progress)
    with staged_directory(options.output, force=options.force) as folder:
        if options.keep_onnx:
            for role, model in models.items():
                save_portable(model, folder / "onnx" / f"{role}.onnx")
        results = _lower(models, options.dump_passes, progress)
        weights = _collect_weights(models)
        size = weight_bytes(weights)
        progress.note(f"the engine stores {size / 1e6:.1f} MB of weights (fp32)")
        require_space(options.output.parent, size)
        graph_bytes = _write_graphs(models, folder)
        report = BuildReport(tuple(results), size, graph_bytes, warnings)
        write_weights(folder / WEIGHTS_FILE, weights, progress)
        for file in target.text_files:
            write_bytes(folder / file.name, file.read_bytes())
        write_bytes(folder / _REPORT_FILE, json_bytes(report))
        progress.start("hashing and checking", 1, "step")
        parts = _Parts(target, draft, plan, models, weights)
        seal(folder, _manifest(options, parts, folder))
    return report


def _export(
    target: TargetCheckpoint, draft: DraftCheckpoint | None, plan: EnginePlan, progress: Progress
) -> dict[str, ir.Model]:
    """The portable graph of every role, its weights bound to the checkpoints."""
    g = target.geometry
    sources = WeightSources(target, draft)
    progress.start("exporting graphs", 3 if draft else 1, "graph")
    models = {"target": graphs.target_graph(g, plan, draft.geometry.taps if draft else ())}
    progress.advance(1)
    if draft is not None:
        models["draft_fuse"] = graphs.draft_fuse_graph(draft.geometry, g)
        progress.advance(1)
        models["draft"] = graphs.draft_graph(draft.geometry, g, plan)
        progress.advance(1)
    for model in models.values():
        sources.bind(model)
    if draft is not None:
        models["expand"] = graphs.expand_graph(draft.geometry, sources)
        models["commit"] = graphs.commit_graph(plan)
    models |= graphs.tree_graphs(g.vocab, plan.limits.draft_depth, draft is not None)
    for model in models.values():
        clear_metadata(model)
    return models


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
            if recipe is None:
                continue
            known = weights.setdefault(name, recipe)
            if (known.shape, known.sources) != (recipe.shape, recipe.sources):
                raise AssertionError(f"two graphs mean different tensors by {name}")
    return weights


def _write_graphs(models: dict[str, ir.Model], folder: Path) -> dict[str, int]:
    sizes = {}
    for role, model in models.items():
        data = portable_proto(model).SerializeToString(deterministic=True)
        write_bytes(folder / _graph_file(role), data)
        sizes[role] = len(data)
    return sizes


def _graph_file(role: str) -> str:
    return f"graphs/{role}.onnx"


def _manifest(options: BuildOptions, parts: _Parts, folder: Path) -> Manifest:
    target, draft, plan = parts.target, parts.draft, parts.plan
    dtypes = {"torch.float32": "F32", "torch.int32": "I32"}
    return Manifest(
        format_version=FORMAT_VERSION,
        specbuild_version=importlib.metadata.version("specbuild"),
        backend=options.backend,
        device="cpu",
        target=target.geometry,
        draft=draft.geometry if draft else None,
        limits=plan.limits,
        draft_default=plan.draft_default,
        cache_groups=plan.groups,
        roles={role: _role(role, model) for role, model in parts.models.items()},
        tensors={
            name: StoredTensor(dtypes[str(recipe.dtype)], recipe.shape, recipe.sources)
            for name, recipe in parts.weights.items()
        },
        options={
            "max_seq_len": options.max_seq_len,
            "max_batch_size": options.max_batch_size,
            "page_size": options.page_size,
            "draft_top_k": options.draft_top_k,
            "draft_depth": options.draft_depth,
            "draft_tokens": options.draft_tokens,
            "draft_window": options.draft_window,
            "keep_onnx": options.keep_onnx,
            "strict": options.strict,
        },
        warnings=(*target.warnings, *(draft.warnings if draft else ())),
        files=stored_files(folder),
    )


def _role(role: str, model: ir.Model) -> Role:
    graph = model.graph
    counts = Counter(
        f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in graph
    )
    return Role(
        file=_graph_file(role),
        inputs=tuple(map(_port, graph.inputs)),
        outputs=tuple(map(_port, graph.outputs)),
        tensors=tuple(
            name for name, value in graph.initializers.items() if recipe_of(value) is not None
        ),
        ops=dict(sorted(counts.items())),
    )


def _port(value: ir.Value) -> Port:
    assert value.name is not None and value.dtype is not None and value.shape is not None
    shape = tuple(size if isinstance(size, int) else str(size.value) for size in value.shape)
    return Port(value.name, value.dtype.name.lower(), shape)
