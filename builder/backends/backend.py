"""What the backends make of the portable graphs: the files and weights of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from specbuild.builder.backends.cpu.lowering import CPU_PASSES
from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.engine import (
    CudaEngine,
    CudaModel,
    LoweredEngine,
    compile_engine,
    lower_engine,
    target_of,
)
from specbuild.builder.backends.cuda.lowering import cuda_passes
from specbuild.builder.backends.cuda.report import CudaReport
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering, without_spills
from specbuild.builder.backends.cuda.tactics.tactic_book import (
    TacticBook,
    require_tuned,
    shipped_tactics,
    tactics_report,
)
from specbuild.builder.backends.tensorrt.build_plans import MakePlans, plan_maker
from specbuild.builder.backends.tensorrt.capabilities import expert_storage
from specbuild.builder.backends.tensorrt.standard.lowering import standard_passes
from specbuild.builder.backends.tensorrt.standard.profiles import role_profiles
from specbuild.builder.engine.manifest import graph_file
from specbuild.builder.engine.sizes import EnginePlan
from specbuild.builder.graph.passes.pipeline import GraphPass, PassResult, run_passes
from specbuild.builder.graph.passes.portable import portable_bytes
from specbuild.builder.graph.passes.weights import Recipe, recipe_of
from specbuild.builder.graph.weight_sources import WeightSources
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import Progress

# The roles that are models; a CUDA step has the others' ops between them.
MODEL_ROLES = ("target", "draft_fuse", "draft")


@dataclass(frozen=True)
class LoweringRun:
    """What is lowered for, where the graph after each pass goes, and who hears of it.

    ``tactics`` choose among the kernels of a GPU; ``tuned_only`` refuses a shape without one.
    """

    device: str
    dump_passes: Path | None
    progress: Progress
    tactics: TacticBook | None = None
    tuned_only: bool = False


@dataclass(frozen=True)
class Lowered:
    """Files and weights; ``models`` are the graphs among the files, by role.

    ``plan`` is the engine's, with what the backend settled of it. ``make_plans`` builds the engines
    that take the graphs' place, None where there are none; they hold the weights too, unless these
    are ``weights_beside``.
    """

    plan: EnginePlan
    models: dict[str, ir.Model]
    files: dict[str, bytes]
    weights: dict[str, Recipe]
    passes: tuple[PassResult, ...]
    cuda: CudaReport | None = None
    make_plans: MakePlans | None = None
    weights_beside: bool = False


def lower_cpu(models: dict[str, ir.Model], plan: EnginePlan, run: LoweringRun) -> Lowered:
    """Every role becomes a graph of standard ops."""
    passes = run_role_passes(models, lambda _: CPU_PASSES, run)
    files = {graph_file(role): portable_bytes(model) for role, model in models.items()}
    return Lowered(plan, models, files, _collect_weights(models), passes)


def lower_cuda(
    models: dict[str, ir.Model], plan: EnginePlan, sources: WeightSources, run: LoweringRun
) -> Lowered:
    """The models' graphs become programs of kernel launches, the other roles ops of these."""
    models = {role: models[role] for role in MODEL_ROLES if role in models}
    draft = sources.draft_geometry
    dtype = (draft.dtype if draft is not None else None) or "bf16"
    passes = run_role_passes(models, lambda role: cuda_passes(role, dtype), run)
    d2t = None if draft is None else sources.d2t()
    target, compiler = target_of(run.device), Compiler(run.device)
    model = CudaModel(models, sources.target_geometry, draft, d2t)

    def make(lowering: CallLowering) -> tuple[LoweredEngine, CudaEngine]:
        lowered = lower_engine(model, plan, target, lowering)
        if run.tuned_only:
            require_tuned(lowering.tactics, lowering.choices(p for _, p in lowered.programs))
        return lowered, compile_engine(lowered, compiler, run.progress)

    book = run.tactics or shipped_tactics(run.device)
    lowering, (lowered, engine) = without_spills(target, book, make)
    choices = lowering.choices(program for _, program in lowered.programs)
    report = replace(engine.report, tactics=tactics_report(lowering.tactics, choices))
    return Lowered(lowered.plan, {}, dict(engine.files), lowered.weights, passes, report)


def lower_tensorrt_rtx(
    models: dict[str, ir.Model], plan: EnginePlan, options: BuildOptions, run: LoweringRun
) -> Lowered:
    """Every role becomes a graph of standard ops, and that an engine of TensorRT-RTX."""
    capabilities = tuple(run.device.split(","))
    steps = standard_passes(expert_storage(capabilities))
    passes = run_role_passes(models, lambda _: steps, run)
    make = plan_maker(models, role_profiles(plan), capabilities, options, run.progress)
    weights, beside = _collect_weights(models), options.tensorrt.strip_weights
    return Lowered(plan, models, {}, weights, passes, make_plans=make, weights_beside=beside)


def run_role_passes(
    models: dict[str, ir.Model], passes_of: Callable[[str], Sequence[GraphPass]], run: LoweringRun
) -> tuple[PassResult, ...]:
    """Runs a role's passes over its graph, for every role."""
    run.progress.start("lowering graphs", len(models), "graph")
    results = []
    for role, model in models.items():
        results += run_passes(role, model, passes_of(role), run.dump_passes)
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
