"""What the backends make of the portable graphs: the files and weights of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from specbuild.builder.backends.cpu.lowering import CPU_PASSES
from specbuild.builder.backends.cuda.engine import (
    CudaModel,
    compile_engine,
    lower_engine,
    target_of,
)
from specbuild.builder.backends.cuda.lowering import CUDA_PASSES
from specbuild.builder.backends.cuda.nvrtc import Compiler
from specbuild.builder.backends.cuda.report import CudaReport
from specbuild.builder.engine_manifest import graph_file
from specbuild.builder.limits import EnginePlan
from specbuild.builder.passes.pipeline import GraphPass, PassResult, run_passes
from specbuild.builder.passes.portable import portable_bytes
from specbuild.builder.passes.weights import Recipe, recipe_of
from specbuild.builder.progress import Progress
from specbuild.builder.weight_sources import WeightSources

# The roles that are models; a CUDA step has the others' ops between them.
MODEL_ROLES = ("target", "draft_fuse", "draft")


@dataclass(frozen=True)
class LoweringRun:
    """What is lowered for, where the graph after each pass goes, and who hears of it."""

    device: str
    dump_passes: Path | None
    progress: Progress


@dataclass(frozen=True)
class Lowered:
    """Files and weights; ``models`` are the graphs among the files, by role.

    ``plan`` is the engine's, with what the backend settled of it.
    """

    plan: EnginePlan
    models: dict[str, ir.Model]
    files: dict[str, bytes]
    weights: dict[str, Recipe]
    passes: tuple[PassResult, ...]
    cuda: CudaReport | None = None


def lower_cpu(models: dict[str, ir.Model], plan: EnginePlan, run: LoweringRun) -> Lowered:
    """Every role becomes a graph of standard ops."""
    passes = _run_passes(models, CPU_PASSES, run)
    files = {graph_file(role): portable_bytes(model) for role, model in models.items()}
    return Lowered(plan, models, files, _collect_weights(models), passes)


def lower_cuda(
    models: dict[str, ir.Model], plan: EnginePlan, sources: WeightSources, run: LoweringRun
) -> Lowered:
    """The models' graphs become programs of kernel launches, the other roles ops of these."""
    models = {role: models[role] for role in MODEL_ROLES if role in models}
    passes = _run_passes(models, CUDA_PASSES, run)
    draft = sources.draft_geometry
    d2t = None if draft is None else sources.d2t()
    lowered = lower_engine(
        CudaModel(models, sources.target_geometry, draft, d2t), plan, target_of(run.device)
    )
    engine = compile_engine(lowered, Compiler(run.device), run.progress)
    return Lowered(lowered.plan, {}, dict(engine.files), lowered.weights, passes, engine.report)


def _run_passes(
    models: dict[str, ir.Model], passes: Sequence[GraphPass], run: LoweringRun
) -> tuple[PassResult, ...]:
    run.progress.start("lowering graphs", len(models), "graph")
    results = []
    for role, model in models.items():
        results += run_passes(role, model, passes, run.dump_passes)
        run.progress.advance(1)
    return tuple(results)


def _collect_weights(models: dict[str, ir.Model]) -> dict[str, Recipe]:
    """Every weight that a graph names, once, in the order of first use."""
    weights: dict[str, Recipe] = {}
    for model in models.values():
        for name, value in model.graph.initializers.items():
            recipe = recipe_of(value)
            if recipe is not None and not weights.setdefault(name, recipe).describes(recipe):
                raise AssertionError(f"two graphs mean different tensors by {name}")
    return weights
