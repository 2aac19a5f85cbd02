"""How long a program takes, and which of its launches take how much of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from specbuild.runtime.engine_dir.plan import ProgramEntry
from specbuild.runtime.executors.cuda.gpu import Handle, LaunchConfig
from specbuild.runtime.executors.cuda.programs import ProgramRunner

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
    described = runner.launches(entry)
    totals = time_prefixes(runner, entry, range(1, len(described) + 1), repeats, reset=reset)
    return [
        LaunchTime(runner.kernel_name(launch.kernel), launch.op, total_s - before_s)
        for launch, total_s, before_s in zip(described, totals, [0.0, *totals], strict=False)
    ]


def time_prefixes(
    runner: ProgramRunner,
    entry: ProgramEntry,
    counts: Iterable[int],
    repeats: int = 20,
    *,
    reset: Callable[[], None] | None = None,
) -> list[float]:
    """Median seconds of the program's first ``count`` launches, for every count.

    The last of them may be an op's first: the next run begins with the scratch that ops expect.
    """
    launches, times = runner.program(entry).launches, []

    def restart() -> None:
        runner.clear_scratch()
        if reset is not None:
            reset()

    for count in counts:
        with _recorded(runner, launches[:count]) as graph:
            times.append(_median_s(runner, _replay(runner, graph), repeats, restart))
    runner.clear_scratch()
    return times


def time_between(
    runner: ProgramRunner,
    entry: ProgramEntry,
    runs: int,
    repeats: int = 20,
    *,
    reset: Callable[[], None] | None = None,
) -> float:
    """Median seconds that the device idles between two runs of a program queued one after another.

    ``runs`` graphs in a row, less one graph of as many copies of the program: what lies between
    graphs and is not there between a program's own launches. The two take turns: a device's clock
    drifts by more than what they differ in.
    """
    runner.prepare(entry)

    def queued() -> None:
        for _ in range(runs):
            runner.start(entry)

    with _recorded(runner, runner.program(entry).launches * runs) as graph:
        turns = _in_turn(runner, (queued, _replay(runner, graph)), repeats, reset)
    return median(queued_s - seamless_s for queued_s, seamless_s in turns) / (runs - 1)


@contextlib.contextmanager
def _recorded(runner: ProgramRunner, launches: Sequence[LaunchConfig]) -> Iterator[Handle]:
    graph = runner.record(launches)
    try:
        yield graph
    finally:
        runner.gpu.release_graph(graph)


def _replay(runner: ProgramRunner, graph: Handle) -> Callable[[], None]:
    return lambda: runner.gpu.launch_graph(graph, runner.stream)


def _median_s(
    runner: ProgramRunner,
    run: Callable[[], None],
    repeats: int,
    reset: Callable[[], None] | None,
) -> float:
    return median(seconds for (seconds,) in _in_turn(runner, (run,), repeats, reset))


def _in_turn(
    runner: ProgramRunner,
    runs: Sequence[Callable[[], None]],
    repeats: int,
    reset: Callable[[], None] | None,
) -> list[list[float]]:
    """Seconds of every run in each of ``repeats`` turns, in which all run one after the other."""
    gpu, stream = runner.gpu, runner.stream
    first, last = gpu.new_event(timed=True), gpu.new_event(timed=True)

    def timed(run: Callable[[], None]) -> float:
        if reset is not None:
            reset()
        gpu.record(first, stream)
        run()
        gpu.record(last, stream)
        gpu.synchronize(stream)
        return gpu.elapsed_s(first, last)

    turns = [[timed(run) for run in runs] for _ in range(WARM_UP + repeats)]
    return turns[WARM_UP:]
