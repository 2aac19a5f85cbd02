"""Measures the launches of a prompt on an engine's device."""

from __future__ import annotations

from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.decode.scheduler import prompt_launches
from specbuild.runtime.measure.anatomy import LaunchTimes, StepAnatomy, step_anatomy
from specbuild.runtime.measure.benchmark_batch import BenchmarkBatch
from specbuild.runtime.measure.byte_floor import Work
from specbuild.runtime.measure.graph_timing import profile_program, time_program
from specbuild.runtime.measure.routed_experts import experts_touched

# Each graph of a prompt takes milliseconds, and there is one graph per launch.
_REPEATS = 3


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
    step_s = time_program(runner, entry, _REPEATS)
    added = profile_program(runner, entry, _REPEATS)
    work = Work(rows, 1, sum(before), experts, logit_rows=1)
    planned = step_anatomy(
        executor.plan, entry, runner.described(entry), work,
        draft=f"{rows} tokens of a prompt", bytes_per_s=bytes_per_s,
    )  # fmt: skip
    return planned.timed(LaunchTimes([launch.added_s for launch in added], step_s))
