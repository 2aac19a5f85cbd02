"""Measures an engine's steps on its device, at a given context and batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.decode.prompt_launches import prompt_launches
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import OpCall, ProgramEntry
from specbuild.runtime.measure.anatomy import LaunchTimes, StepAnatomy, step_anatomy
from specbuild.runtime.measure.benchmark_batch import BenchmarkBatch, cuda_executor
from specbuild.runtime.measure.byte_floor import Work
from specbuild.runtime.measure.graph_timing import (
    profile_program,
    time_between,
    time_overlap,
    time_prefixes,
    time_program,
)
from specbuild.runtime.measure.routed_experts import experts_touched


@dataclass(frozen=True)
class Section:
    """Ops ``first`` … ``last`` of a step, inclusive.

    ``level 1`` ingests the accepted tokens and drafts the first level, and ``level l`` the further
    ones. ``select`` selects the tree's nodes, ``target`` verifies them and samples, and ``accept``
    compares the samples and updates the state.
    """

    name: str
    first: int
    last: int


def step_sections(ops: Sequence[OpCall]) -> tuple[Section, ...]:
    """Return the sections of a decoding step, in order; together they include every op.

    Raises ValueError if an op has no section, so that the program is not a step.
    """
    sections: list[Section] = []
    for name, calls in groupby(ops, key=lambda call: call.section):
        first = sections[-1].last + 1 if sections else 0
        sections.append(Section(name, first, first + len(list(calls)) - 1))
    if not all(section.name for section in sections) or not sections:
        raise ValueError("the ops are not those of a decoding step")
    return tuple(sections)


# The number of consecutive steps that determines the time between two.
STEPS_IN_A_ROW = 8


@dataclass(frozen=True)
class SectionTiming:
    """The median seconds that a section of a step adds to the previous sections."""

    name: str
    added_s: float


@dataclass(frozen=True)
class MeasuredStep:
    """The measurement of a step of placed sequences, with its sections in order.

    Each sequence has ``context`` tokens. ``experts`` is the number of distinct experts that the
    step's rows selected, averaged over layers; None if it cannot be read back. ``idle_s`` is the
    time between two queued steps, if requested.
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
    """Time one step of placed sequences, in full and by section, always from the same state.

    With ``sparse`` it attends to the tokens that indexers select (DSA).
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


def measure_anatomy(
    engine: Engine,
    placed: BenchmarkBatch,
    shape: DraftShape | None,
    *,
    draft: str,
    bytes_per_s: float | None,
    repeats: int = 8,
) -> StepAnatomy:
    """Time every launch of a step of placed sequences, always from the same state.

    ``draft`` describes ``shape``; ``bytes_per_s`` is the bandwidth of a streaming read. Steps at or
    after DSA's threshold are sparse.
    """
    executor, runner, reset = placed.executor, placed.executor.runner, placed.reset
    reset()
    context = placed.context
    entry = _entry(engine, placed.batch, shape, sparse=sparse_at(engine, context))
    experts = experts_touched(executor, entry)
    step_s, serial_step_s = time_overlap(runner, entry, 3 * repeats, reset=reset)
    added, serial = (
        profile_program(runner, entry, repeats, reset=reset, serial=serial)
        for serial in (False, True)
    )
    reset()
    times = LaunchTimes(
        [launch.added_s for launch in added],
        step_s,
        [launch.added_s for launch in serial],
        serial_step_s,
    )
    work = Work(placed.batch * (entry.draft_tokens + 1), placed.batch, context, experts)
    planned = step_anatomy(
        executor.plan, entry, runner.described(entry), work, draft=draft, bytes_per_s=bytes_per_s
    )
    return planned.timed(times)


def sparse_at(engine: Engine, context: float) -> bool:
    """Return whether steps after ``context`` tokens attend to selected tokens (DSA)."""
    dsa = engine.manifest.dsa
    return dsa is not None and context >= dsa.threshold


def _entry(
    engine: Engine, batch: int, shape: DraftShape | None, *, sparse: bool = False
) -> ProgramEntry:
    table = ProgramTable(cuda_executor(engine).plan)
    return table.step(shape, batch=batch, full_logits=False, sparse=sparse)


# Each graph of a prompt takes milliseconds, and there is one graph per launch.
_PROMPT_REPEATS = 3


def measure_prompt_anatomy(placed: BenchmarkBatch, *, bytes_per_s: float | None) -> StepAnatomy:
    """Time every launch of the program that computed the last part of a placed prompt.

    The program runs again on the rows that its ports still have, and so writes the same keys and
    values. ``placed`` must be one sequence; ``bytes_per_s`` is the bandwidth of a streaming read.
    Serial launches are not timed, which would double the duration.
    """
    assert placed.batch == 1, "a launch of several prompts is none of one's alone"
    executor, runner = placed.executor, placed.executor.runner
    table = ProgramTable(executor.plan)
    *before, rows = prompt_launches(placed.tokens.shape[1], table.prefill_rows)
    entry = table.prefill(rows=rows, batch=1, full_logits=False)
    experts = experts_touched(executor, entry)
    step_s = time_program(runner, entry, _PROMPT_REPEATS)
    added = profile_program(runner, entry, _PROMPT_REPEATS)
    work = Work(rows, 1, sum(before), experts, logit_rows=1)
    planned = step_anatomy(
        executor.plan, entry, runner.described(entry), work,
        draft=f"{rows} tokens of a prompt", bytes_per_s=bytes_per_s,
    )  # fmt: skip
    return planned.timed(LaunchTimes([launch.added_s for launch in added], step_s))
