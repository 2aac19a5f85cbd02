"""Builds the CUDA part of an engine: its programs, their launches, the kernels and the plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import TypeAlias

import onnx_ir as ir

from specbuild.builder.backends.cuda.compile.nvrtc import Compiled, Compiler
from specbuild.builder.backends.cuda.plan.plan_writer import (
    Lower,
    LoweredProgram,
    PlanWriter,
    lower_program,
    lowered_calls,
    program_bytes,
)
from specbuild.builder.backends.cuda.report import CudaReport, cuda_report
from specbuild.builder.backends.cuda.sizes import with_padded_latents
from specbuild.builder.backends.cuda.step.draft_levels import tree_candidates
from specbuild.builder.backends.cuda.step.draft_parts import DraftParts
from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.forms import host_chain_forms, step_forms
from specbuild.builder.backends.cuda.step.fused_graph import FusedGraph, WeightTensors
from specbuild.builder.backends.cuda.step.ir import ProgramIr
from specbuild.builder.backends.cuda.step.logit_processor_steps import (
    first_token_program,
    processor_batches,
    processor_program,
)
from specbuild.builder.backends.cuda.step.programs import (
    NO_DRAFT,
    PREFILL_ROWS,
    SCORE_ROWS,
    StepForm,
    batch_buckets,
    deepest,
    draft_shapes,
    prefill_program,
    score_program,
    step_program,
)
from specbuild.builder.backends.cuda.step.state import StatePorts, StateSizes, ViewSizes
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering
from specbuild.builder.engine.sizes import EngineSizes, with_limits
from specbuild.builder.engine.writer import json_bytes
from specbuild.builder.graph.passes.weights import Recipe
from specbuild.builder.progress import Progress
from specbuild.plugins_cuda.launches import Lowering, Target, Unsupported, parameter_bytes
from specbuild.runtime.cache.layout import layouts
from specbuild.runtime.cache.state_layout import state_layout
from specbuild.runtime.engine_dir.features import stored_keys
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import PLAN_FILE, Plan, ProgramEntry
from specbuild.runtime.engine_dir.quantized import QuantizedProducts
from specbuild.runtime.errors import EngineFileError, SpecbuildError
from specbuild.runtime.executors.cuda.cubin import Signatures, kernel_parameters
from specbuild.runtime.executors.cuda.program_file import read_launches

PROGRAM_FOLDER = "programs"

NamedPrograms: TypeAlias = tuple[tuple[ProgramEntry, LoweredProgram], ...]


@dataclass(frozen=True)
class CudaModel:
    """The inputs of a CUDA engine: fused graphs by role, the target's geometry and the drafts.

    With ``prefilter_head`` the target's head is also stored in int8. ``quantized`` describes the
    stored weights of a quantized checkpoint.
    """

    models: Mapping[str, ir.Model]
    target: TargetGeometry
    drafts: tuple[DraftParts, ...]
    prefilter_head: bool = False
    quantized: QuantizedProducts | None = None


@dataclass(frozen=True)
class LoweredEngine:
    """Every program lowered but not compiled. ``engine_sizes`` include the programs' caches.

    ``refused`` has the reasons against prompt chunks of other sizes.
    """

    engine_sizes: EngineSizes
    parts: EngineParts
    writer: PlanWriter
    programs: NamedPrograms
    target: Target
    refused: tuple[Unsupported, ...] = ()

    @property
    def weights(self) -> dict[str, Recipe]:
        """The stored tensors. Larger elements come first, so that each is aligned to its size."""
        recipes = self.parts.weights.recipes
        return dict(sorted(recipes.items(), key=lambda item: -item[1].dtype.itemsize))


@dataclass(frozen=True)
class CudaEngine:
    """The files of the engine directory by name, without the weights, and the build report."""

    plan: Plan
    files: Mapping[str, bytes]
    report: CudaReport


def lower_engine(
    model: CudaModel, engine_sizes: EngineSizes, target: Target, lower: Lower | None = None
) -> LoweredEngine:
    """Lower all programs of an engine. Raises SpecbuildError if an op cannot be lowered."""
    lower = lower or CallLowering(target)
    engine_sizes = with_padded_latents(engine_sizes)
    # Logit-processor steps would not update the state of lossy modes.
    engine_sizes = replace(
        engine_sizes, adjusted_steps=engine_sizes.specpv is None and engine_sizes.dsa is None
    )
    graphs = {role: FusedGraph(role, graph) for role, graph in model.models.items()}
    prefill, refused = _prefill_rows(model, graphs, engine_sizes, lower)
    max_prompt = _max_prompt_rows(engine_sizes)
    score = tuple(rows for rows in SCORE_ROWS if rows <= max_prompt or rows == SCORE_ROWS[0])
    reverified = 0 if engine_sizes.specpv is None else engine_sizes.specpv.n_spec_tokens_buf
    max_rows = max(*prefill, *score, reverified + engine_sizes.limits.draft_tokens + 1)
    engine_sizes = with_limits(engine_sizes, replace(engine_sizes.limits, max_rows=max_rows))
    parts = _parts(model, graphs, engine_sizes, max_rows, max(score))
    programs = []
    for count in prefill:
        programs.append(_entry(parts, "prefill", count, lower))
    for count in score:
        programs.append(_entry(parts, "score", count, lower))
    programs += _steps(model, parts, engine_sizes, lower)
    programs += _host_proposal_steps(parts, engine_sizes, lower)
    if engine_sizes.adjusted_steps:
        programs += _logit_processor_steps(parts, engine_sizes, lower)
    engine_sizes = replace(engine_sizes, ragged_steps=any(entry.is_ragged for entry, _ in programs))
    writer = PlanWriter(
        [lowered for _, lowered in programs],
        parts.weights.tensors,
        (*parts.caches.values(), *filter(None, (parts.summaries, parts.state_cache))),
        parts.ports.tensors,
        [tensor for tensor in parts.ports.exchange.values() if tensor.storage.space == "exchange"],
        engine_sizes.ranks,
    )
    return LoweredEngine(engine_sizes, parts, writer, tuple(programs), target, refused)


def compile_engine(
    lowered: LoweredEngine, compiler: Compiler, progress: Progress
) -> CudaEngine | Unsupported:
    """Compile every kernel and write the plan. Raises SpecbuildError like Compiler."""
    return compile_programs(lowered.writer, lowered.programs, lowered.target, compiler, progress)


def compile_programs(
    writer: PlanWriter,
    programs: NamedPrograms,
    target: Target,
    compiler: Compiler,
    progress: Progress,
) -> CudaEngine | Unsupported:
    """Compile the programs of a writer and write the plan."""
    missing = compiler.missing(writer.kernels)
    progress.start("compiling kernels", len(missing), "source")
    compiled = compiler.compile(writer.kernels, lambda: progress.advance(1))
    if isinstance(compiled, Unsupported):
        return compiled
    for entry, program in programs:
        check_arguments(entry.name, program.lowerings, compiled)
    entries = [entry for entry, _ in programs]
    plan = writer.plan(target, compiler.driver_version, compiled.kernels, entries)
    files = {PLAN_FILE: json_bytes(stored_keys(plan))}
    for entry, program in programs:
        files[entry.file] = program_bytes(writer.program(program))
        _check_readable(files[entry.file], plan, entry)
    files |= compiled.files
    return CudaEngine(plan, files, cuda_report(plan, programs))


def check_arguments(where: str, lowerings: Iterable[Lowering], compiled: Compiled) -> None:
    """Raise AssertionError if a launch passes other arguments than its kernel's machine code."""
    for lowering in lowerings:
        for launch in lowering.launches:
            entry = compiled.kernels[launch.kernel]
            sizes = _signatures(compiled.files[entry.cubin], entry.cubin)[entry.entry]
            passed = tuple(map(parameter_bytes, launch.arguments))
            if passed != sizes:
                raise AssertionError(
                    f"{where}: {entry.name} has parameters of {sizes} bytes, but the launch passes "
                    f"{passed}"
                )


@lru_cache(maxsize=512)
def _signatures(cubin: bytes, name: str) -> Signatures:
    return kernel_parameters(cubin, name)


def _check_readable(data: bytes, plan: Plan, entry: ProgramEntry) -> None:
    """Raise AssertionError if the runtime would reject a program."""
    try:
        read_launches(data, plan, entry)
    except EngineFileError as error:
        raise AssertionError(str(error)) from error


def _prefill_rows(
    model: CudaModel, graphs: Mapping[str, FusedGraph], engine_sizes: EngineSizes, lower: Lower
) -> tuple[tuple[int, ...], tuple[Unsupported, ...]]:
    """Return the prompt chunks that all ops support, and the reasons against the others."""
    max_rows = _max_prompt_rows(engine_sizes)
    sizes = [rows for rows in PREFILL_ROWS if rows < max_rows]
    sizes += [rows for rows in PREFILL_ROWS if rows >= max_rows][:1]
    parts = _parts(model, graphs, engine_sizes, sizes[-1], SCORE_ROWS[-1])
    supported, refused = [], []
    for rows in sizes:
        lowered = lowered_calls(prefill_program(parts, rows), lower)
        if isinstance(lowered, Unsupported):
            refused.append(Unsupported(f"prompt chunks of {rows} rows: {lowered.reason}"))
        else:
            supported.append(rows)
    if not supported:
        raise SpecbuildError(f"no prompt chunk can be lowered: {refused[-1].reason}")
    return tuple(supported), tuple(refused)


def _max_prompt_rows(engine_sizes: EngineSizes) -> int:
    """Return the maximum number of prompt rows of all sequences together."""
    return engine_sizes.limits.max_seq_len * engine_sizes.limits.max_batch_size


def _parts(
    model: CudaModel,
    graphs: Mapping[str, FusedGraph],
    engine_sizes: EngineSizes,
    prefill_rows: int,
    score_rows: int,
) -> EngineParts:
    limits, groups = engine_sizes.limits, layouts(engine_sizes.groups, engine_sizes.ranks)
    (states,) = (*map(partial(state_layout, limits=limits), engine_sizes.states), None)[:1]
    max_proposal = engine_sizes.host_chain
    depth = max(map(deepest, _shapes(model, engine_sizes).values()), default=0)
    sizes = StateSizes(
        batch=batch_buckets(limits.max_batch_size)[-1],
        depth=depth,
        aux_width=max((draft.layers for draft in model.drafts), default=0) * model.target.hidden,
        words=-(-(limits.draft_tokens + 1) // 32),
        logical_pages={name: layout.logical_pages(limits) for name, layout in groups.items()},
        prefill_rows=max(prefill_rows, score_rows),
        score_rows=score_rows,
        vocab=model.target.vocab,
        views=_view_sizes(engine_sizes),
        sparse=engine_sizes.dsa is not None,
        checks=engine_sizes.dsa is not None and engine_sizes.dsa.check_interval > 0,
        has_processors=engine_sizes.adjusted_steps,
        max_proposal=max_proposal,
        tree_candidates=tree_candidates(model.drafts, _shapes(model, engine_sizes)),
        max_replay=0 if states is None else max(depth, max_proposal) + 1,
        ranks=engine_sizes.ranks,
        exchange_width=model.target.hidden,
    )
    return EngineParts(
        graphs,
        WeightTensors(),
        StatePorts(sizes),
        groups,
        {draft.drafter: draft for draft in model.drafts},
        engine_sizes.views,
        engine_sizes.dsa,
        prefilter_head=model.prefilter_head,
        states=states,
    )


def _shapes(model: CudaModel, engine_sizes: EngineSizes) -> dict[str, tuple[DraftShape, ...]]:
    """Return the shapes for which each draft's steps are built, by the drafter of their forms."""
    return {
        draft.drafter: draft_shapes(engine_sizes.model_shapes[draft.group])
        for draft in model.drafts
    }


def _view_sizes(engine_sizes: EngineSizes) -> ViewSizes | None:
    if engine_sizes.specpv is None or engine_sizes.views is None:
        return None
    group = engine_sizes.choosing_group
    buffer = engine_sizes.specpv.n_spec_tokens_buf
    return ViewSizes(len(group.layers), group.kv_heads, engine_sizes.views.entries, buffer)


def _entry(
    parts: EngineParts, kind: str, rows: int, lower: Lower
) -> tuple[ProgramEntry, LoweredProgram]:
    """Lower a prefill or score program and return it with its entry in the plan."""
    build = {"prefill": prefill_program, "score": score_program}[kind]
    lowered = _lowered(build(parts, rows), lower)
    batch = parts.ports.sizes.batch
    return _described(lowered, kind, batch, rows, NO_DRAFT, full_logits=True), lowered


def _steps(
    model: CudaModel, parts: EngineParts, engine_sizes: EngineSizes, lower: Lower
) -> list[tuple[ProgramEntry, LoweredProgram]]:
    """Return the decode steps except host-proposal and logit-processor steps."""
    forms = step_forms(parts, _shapes(model, engine_sizes), engine_sizes.limits.max_batch_size)
    return [_step(parts, form, lower) for form in forms]


def _step(parts: EngineParts, form: StepForm, lower: Lower) -> tuple[ProgramEntry, LoweredProgram]:
    lowered = _lowered(step_program(parts, form), lower)
    full_logits = form.logits != "none"
    entry = _described(lowered, "step", form.batch, form.rows, form.shape, full_logits=full_logits)
    return replace(
        entry,
        extends=form.extends,
        reverified=form.capacity,
        sparse=form.sparse,
        checks=form.checks,
        host_proposal=form.host_proposal,
        drafter=form.drafter,
        is_ragged=form.ragged_rows > 0,
    ), lowered


def _host_proposal_steps(
    parts: EngineParts, engine_sizes: EngineSizes, lower: Lower
) -> list[tuple[ProgramEntry, LoweredProgram]]:
    """Return the steps that verify host proposals."""
    return [_step(parts, form, lower) for form in host_chain_forms(parts, engine_sizes)]


def _logit_processor_steps(
    parts: EngineParts, engine_sizes: EngineSizes, lower: Lower
) -> list[tuple[ProgramEntry, LoweredProgram]]:
    """Return the logit-processor steps, and the program that runs them after prompts."""
    programs = []
    kinds = (False, True) if parts.ports.sizes.aux_width else (False,)
    for batch, extends in product(processor_batches(engine_sizes.limits.max_batch_size), kinds):
        lowered = _lowered(processor_program(parts, batch, extends=extends), lower)
        entry = _described(lowered, "step", batch, batch, NO_DRAFT, full_logits=True)
        programs.append((replace(entry, changes_logits=True, extends=extends), lowered))
    lowered, batch = _lowered(first_token_program(parts), lower), parts.ports.sizes.batch
    programs.append(
        (_described(lowered, "adjust", batch, batch, NO_DRAFT, full_logits=True), lowered)
    )
    return programs


def _lowered(program: ProgramIr, lower: Lower) -> LoweredProgram:
    """Lower a complete program."""
    program.end_exchanges()
    return lower_program(program, lower)


def _described(
    lowered: LoweredProgram,
    kind: str,
    batch: int,
    rows: int,
    shape: DraftShape,
    *,
    full_logits: bool,
) -> ProgramEntry:
    name = lowered.ir.name
    return ProgramEntry(
        name=name,
        file=f"{PROGRAM_FOLDER}/{name}.json",
        kind=kind,  # type: ignore[arg-type]
        batch=batch,
        rows=rows,
        draft_top_k=shape.draft_top_k,
        draft_depth=shape.draft_depth,
        draft_tokens=shape.draft_tokens,
        full_logits=full_logits,
        launches=sum(len(lowering.launches) for lowering in lowered.lowerings),
        rounds=lowered.ir.rounds,
    )
