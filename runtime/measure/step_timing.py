"""How long an engine's own steps take on its device, at a context and batch of one's choice."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.runtime.decode.program_table import ProgramTable
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import ProgramEntry
from specbuild.runtime.measure.benchmark_batch import BenchmarkBatch, cuda_executor
from specbuild.runtime.measure.graph_timing import time_between, time_prefixes, time_program
from specbuild.runtime.measure.routed_experts import experts_touched
from specbuild.runtime.measure.step_sections import step_sections

# Steps in a row from which the time between two of them is taken.
STEPS_IN_A_ROW = 8


@dataclass(frozen=True)
class SectionTiming:
    """Median seconds that a section of a step adds to those before it."""

    name: str
    added_s: float


@dataclass(frozen=True)
class MeasuredStep:
    """A step of placed sequences: its sections in order, and what it found.

    ``context`` tokens a sequence. ``experts`` are the distinct ones that the step's rows chose,
    on average over the layers; None where that cannot be read back. ``idle_s`` lies between two
    such steps that are queued one after the other, if asked.
    """

    entry: ProgramEntry
    step_s: float
    sections: tuple[SectionTiming, ...]
    context: float
    experts: float | None
    idle_s: float | None


def measure_step(
    engine: Engine,
    placed: BenchmarkBatch,
    shape: DraftShape | None,
    *,
    repeats: int = 30,
    idle: bool = False,
    sparse: bool = False,
) -> MeasuredStep:
    """Times one step of placed sequences as a whole and by section, always from the same state.

    ``sparse``: it attends to what indexers choose (DSA).
    """
    executor, reset = placed.executor, placed.reset
    entry, runner = _entry(engine, placed.batch, shape, sparse=sparse), executor.runner
    reset()
    context = placed.context
    experts = experts_touched(executor, entry)
    step_s = time_program(runner, entry, repeats, reset=reset)
    sections = step_sections(runner.described(entry).ops)
    launches = runner.launches(entry)
    counts = [sum(launch.op <= section.last for launch in launches) for section in sections]
    totals = time_prefixes(runner, entry, counts, repeats, reset=reset)
    timed = tuple(
        SectionTiming(section.name, total_s - before_s)
        for section, total_s, before_s in zip(sections, totals, [0.0, *totals], strict=False)
    )
    idle_s = None
    if idle:
        idle_s = time_between(runner, entry, STEPS_IN_A_ROW, repeats, reset=reset)
    reset()
    return MeasuredStep(entry, step_s, timed, context, experts, idle_s)


def sparse_at(engine: Engine, context: float) -> bool:
    """Whether steps after so many tokens attend to what indexers choose (DSA)."""
    dsa = engine.manifest.dsa
    return dsa is not None and context >= dsa.threshold


def _entry(
    engine: Engine, batch: int, shape: DraftShape | None, *, sparse: bool = False
) -> ProgramEntry:
    table = ProgramTable(cuda_executor(engine).plan)
    return table.step(shape, batch=batch, full_logits=False, sparse=sparse)
