"""How long a program takes, and which of its launches take how much of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from specbuild.runtime.executors.cuda.gpu import Handle
from specbuild.runtime.executors.cuda.programs import ProgramRunner
from specbuild.runtime.plan import ProgramEntry

WARM_UP = 3


@dataclass(frozen=True)
class LaunchTime:
    """What a launch adds to its program: ``op`` indexes the program's ops."""

    kernel: str
    op: int
    added_s: float


def time_program(
    runner: ProgramRunner,
    entry: ProgramEntry,
    repeats: int = 50,
    *,
    reset: Callable[[], None] | None = None,
) -> float:
    """Median seconds of a program on the device, each run between two events of its own.

    ``reset`` is called before each run and queues what the run needs on the runner's stream: a
    step moves its sequences on. Runs of a step count in the ring.
    """
    runner.prepare(entry)
    return _median_s(runner, lambda: runner.start(entry), repeats, reset)


def profile_program(
    runner: ProgramRunner,
    entry: ProgramEntry,
    repeats: int = 20,
    *,
    reset: Callable[[], None] | None = None,
) -> list[LaunchTime]:
    """What each launch adds to the time of the launches before it, in order.

    Graphs of the first 1, 2, 3, … launches are timed, so that overlaps between neighbours show as
    they are in the whole. A launch that hides behind its neighbours adds less than it takes.
    """
    program, described = runner.program(entry), runner.launches(entry)
    times, before_s = [], 0.0
    for count, launch in enumerate(described, start=1):
        graph = runner.record(program.launches[:count])
        try:
            total_s = _median_s(runner, _replay(runner, graph), repeats, reset)
        finally:
            runner.gpu.release_graph(graph)
        name = runner.kernel_name(launch.kernel)
        times.append(LaunchTime(name, launch.op, total_s - before_s))
        before_s = total_s
    return times


def _replay(runner: ProgramRunner, graph: Handle) -> Callable[[], None]:
    return lambda: runner.gpu.launch_graph(graph, runner.stream)


def _median_s(
    runner: ProgramRunner,
    run: Callable[[], None],
    repeats: int,
    reset: Callable[[], None] | None,
) -> float:
    gpu, stream = runner.gpu, runner.stream
    first, last = gpu.new_event(timed=True), gpu.new_event(timed=True)
    times = []
    for i in range(WARM_UP + repeats):
        if reset is not None:
            reset()
        gpu.record(first, stream)
        run()
        gpu.record(last, stream)
        gpu.synchronize(stream)
        if i >= WARM_UP:
            times.append(gpu.elapsed_s(first, last))
    return median(times)
