"""Measures the time of a program, and the share of each of its launches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from specbuild.runtime.engine_dir.plan import ProgramEntry
from specbuild.runtime.executors.cuda.gpu import Handle, LaunchConfig
from specbuild.runtime.executors.cuda.programs import ProgramRunner

WARM_UP = 3
# The number of a profile's graphs that exist at once and are timed alternately.
_PREFIXES_IN_TURN = 8


@dataclass(frozen=True)
class LaunchTime:
    """The time that a launch adds to its program: ``op`` is an index of the program's ops."""

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
    """Return the median seconds of a program on the device, each run between its own two events.

    ``reset`` is called before each run and queues the writes that it needs on the runner's stream,
    since a step advances its sequences. Runs of a step count in the ring.
    """
    runner.prepare(entry)
    return _median_s(runner, lambda: runner.start(entry), repeats, reset)


def time_overlap(
    runner: ProgramRunner,
    entry: ProgramEntry,
    repeats: int = 20,
    *,
    reset: Callable[[], None] | None = None,
) -> tuple[float, float]:
    """Return the median seconds of a program as it is, and without overlap of launches.

    The two are measured alternately.
    """
    launches = runner.program(entry).launches
    with _recorded(runner, launches) as graph, _recorded(runner, _serial(launches)) as serial:
        runs = (_replay(runner, graph), _replay(runner, serial))
        rounds = _alternate(runner, runs, repeats, reset)
    return median(round_s[0] for round_s in rounds), median(round_s[1] for round_s in rounds)


def profile_program(
    runner: ProgramRunner,
    entry: ProgramEntry,
    repeats: int = 20,
    *,
    reset: Callable[[], None] | None = None,
    serial: bool = False,
) -> list[LaunchTime]:
    """Return the time that each launch adds to the previous launches, in order.

    Graphs of the first 1, 2, 3, … launches are timed, so that neighbours overlap as they do in the
    program. A launch that is hidden by its neighbours adds less than its duration. Neighbouring
    graphs are timed alternately, since a device's clock drifts by more than their difference. With
    ``serial`` each launch waits for the end of the previous one. The first launch includes the
    start of a graph.
    """
    described = runner.launches(entry)
    launches = runner.program(entry).launches
    launches = _serial(launches) if serial else launches
    added_s: list[float] = []
    for first in range(0, len(launches), _PREFIXES_IN_TURN):
        ends = range(first + 1, min(first + _PREFIXES_IN_TURN, len(launches)) + 1)
        counts = [*([first] if first else []), *ends]
        rounds = _alternate_prefixes(runner, launches, counts, repeats, reset)
        if not first:
            rounds = [[0.0, *round_s] for round_s in rounds]
        for before, after in itertools.pairwise(range(len(rounds[0]))):
            added_s.append(median(round_s[after] - round_s[before] for round_s in rounds))
    runner.clear_scratch()
    return [
        LaunchTime(runner.kernel_name(launch.kernel), launch.op, seconds)
        for launch, seconds in zip(described, added_s, strict=True)
    ]


def _serial(launches: Sequence[LaunchConfig]) -> tuple[LaunchConfig, ...]:
    """Return the same launches, each waiting for the end of the previous one."""
    return tuple(replace(launch, programmatic=False) for launch in launches)


def _alternate_prefixes(
    runner: ProgramRunner,
    launches: Sequence[LaunchConfig],
    counts: Sequence[int],
    repeats: int,
    reset: Callable[[], None] | None,
) -> list[list[float]]:
    """Return the seconds of the first ``count`` launches, for every count, of each repeat."""
    with contextlib.ExitStack() as recorded:
        graphs = [recorded.enter_context(_recorded(runner, launches[:n])) for n in counts]
        runs = [_replay(runner, graph) for graph in graphs]
        return _alternate(runner, runs, repeats, _with_scratch(runner, reset))


def _with_scratch(runner: ProgramRunner, reset: Callable[[], None] | None) -> Callable[[], None]:
    """Return a reset after which a run finds the scratch that ops expect.

    The last launch of a prefix may be the first launch of an op.
    """

    def restart() -> None:
        runner.clear_scratch()
        if reset is not None:
            reset()

    return restart


def time_prefixes(
    runner: ProgramRunner,
    entry: ProgramEntry,
    counts: Iterable[int],
    repeats: int = 20,
    *,
    reset: Callable[[], None] | None = None,
) -> list[float]:
    """Return the median seconds of the program's first ``count`` launches, for every count."""
    launches, times = runner.program(entry).launches, []
    restart = _with_scratch(runner, reset)
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
    """Return the median seconds that the device is idle between two queued runs of a program.

    It is the time of ``runs`` consecutive graphs, minus that of one graph with as many copies of
    the program, so only the gaps between graphs remain. The two are timed alternately, since a
    device's clock drifts by more than their difference.
    """
    runner.prepare(entry)

    def queued() -> None:
        for _ in range(runs):
            runner.start(entry)

    with _recorded(runner, runner.program(entry).launches * runs) as graph:
        rounds = _alternate(runner, (queued, _replay(runner, graph)), repeats, reset)
    return median(queued_s - seamless_s for queued_s, seamless_s in rounds) / (runs - 1)


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
    return median(seconds for (seconds,) in _alternate(runner, (run,), repeats, reset))


def _alternate(
    runner: ProgramRunner,
    runs: Sequence[Callable[[], None]],
    repeats: int,
    reset: Callable[[], None] | None,
) -> list[list[float]]:
    """Return the seconds of every run, in each of ``repeats`` rounds that run all in order."""
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

    rounds = [[timed(run) for run in runs] for _ in range(WARM_UP + repeats)]
    return rounds[WARM_UP:]
