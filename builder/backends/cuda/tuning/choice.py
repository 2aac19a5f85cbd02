"""Which tactic is the fastest of a shape: what is timed, and by what rule one is chosen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler, Spills
from specbuild.builder.backends.cuda.plan.plan_reader import ReadPlan
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering
from specbuild.builder.backends.cuda.tactics.entry_request import entry_request
from specbuild.builder.backends.cuda.tactics.tactic_book import layer_of, rows_of
from specbuild.builder.backends.cuda.tactics.tactic_file import TacticEntry, request_key, shape_key
from specbuild.builder.backends.cuda.tuning.prompt_cuts import Cut, cuts_of
from specbuild.builder.backends.cuda.tuning.timer import Candidate, CandidateTimer, Measured
from specbuild.builder.progress import Progress
from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    Tactic,
    Target,
    Unsupported,
    require,
)
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.registry import op_named

# A candidate must be this much faster than the default, and nowhere slower than by as much.
MARGIN = 0.02


@dataclass(frozen=True)
class Shape:
    """Requests that share an entry; the one with the most rows is measured."""

    op: OpSpec
    requests: tuple[LoweringRequest, ...]

    @property
    def request(self) -> LoweringRequest:
        """The one that is measured."""
        return self.requests[0]

    @property
    def tactics(self) -> tuple[Tactic, ...]:
        """Its candidates; the first is the default, whatever that is for other rows."""
        assert self.op.tactics is not None
        return ({}, *self.op.tactics(self.request)[1:])

    @property
    def cut_requests(self) -> list[LoweringRequest]:
        """What the launches of its prompt chunk are lowered for where that is cut."""
        return [piece.request for cut in cuts_of(self.op, self.request) for piece in cut]

    @property
    def rows(self) -> int:
        """The rows of that one."""
        return rows_of(self.request)

    @property
    def key(self) -> str:
        """What the entry is found by."""
        return request_key(self.op, self.request)

    @property
    def layer(self) -> str:
        """What tells it from other layers; equal ones have the same weights."""
        return layer_of(self.op, self.request)


@dataclass(frozen=True)
class Dropped:
    """A candidate that was measured and may not be taken."""

    tactic: dict[str, int]
    reason: str


@dataclass(frozen=True)
class TunedShape:
    """A shape that was measured; ``tactic`` is empty where the default stays."""

    op: str
    phase: str
    rows: int
    candidates: int
    tactic: dict[str, int]
    median_us: float
    default_us: float
    dropped: tuple[Dropped, ...] = ()


def shapes_of(found: ReadPlan, target: Target) -> list[Shape]:
    """Every shape of the programs that has several tactics: by layer, few rows first."""
    lowering = CallLowering(target)
    requests: dict[str, tuple[OpSpec, dict[str, LoweringRequest]]] = {}
    for _, program in found.programs:
        for call in program.calls:
            choice = lowering.choice(call, program.phase)
            if choice.tunable:
                key = request_key(choice.op, choice.request)
                _, same = requests.setdefault(key, (choice.op, {}))
                same.setdefault(repr(choice.request), choice.request)
    shapes = [
        Shape(op, tuple(sorted(same.values(), key=rows_of, reverse=True)))
        for op, same in requests.values()
    ]
    return sorted(shapes, key=lambda s: (s.request.phase, s.layer, rows_of(s.request)))


def shape_of(entry: TacticEntry, target: Target) -> Shape | Unsupported:
    """The shape that an entry was measured at; or why no op of this specbuild has it."""
    request = entry_request(replace(entry, tactic={}), target)
    if isinstance(request, Unsupported):
        return request
    return Shape(op_named(entry.op), (request,))


def fastest(measured: Sequence[Measured]) -> list[int]:
    """Candidates that beat the default, the best first; by the mean of their settings' ratios."""
    default = measured[0].us
    ranked = []
    for index, candidate in enumerate(measured[1:], 1):
        ratios = [us / base for us, base in zip(candidate.us, default, strict=True)]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        if candidate.differing == 0 and mean < 1 - MARGIN and max(ratios) <= 1 + MARGIN:
            ranked.append((mean, index))
    return [index for _, index in sorted(ranked)]


def default_kernels(shapes: Iterable[Shape]) -> Iterator[Kernel]:
    """What the shapes launch by default."""
    for shape in shapes:
        for request in shape.requests:
            yield from _kernels(shape.op, request, {})


def measure_all(
    shapes: Sequence[Shape],
    compiler: Compiler,
    timer: CandidateTimer,
    progress: Progress,
    deadline: float,
) -> tuple[list[TacticEntry], list[TunedShape]]:
    """Entries for as many shapes as can be started before ``deadline`` (of ``time.monotonic``)."""
    layers: dict[str, list[Shape]] = {}
    for shape in shapes:
        layers.setdefault(shape.layer, []).append(shape)
    chosen: list[tuple[TacticEntry, TunedShape]] = []
    for layer, same in layers.items():
        if time.monotonic() >= deadline:
            break
        candidates = [
            (shape.op, request, tactic)
            for shape in same
            for request in (shape.request, *shape.cut_requests)
            for tactic in shape.tactics
        ]
        _compile_all(f"compiling {layer}", candidates, compiler, progress)
        progress.start(f"timing {layer}", len(same), "shape")
        trials = []
        for shape in same:
            if time.monotonic() >= deadline:
                break
            trials.append(_measured(shape, compiler, timer, progress.note))
            progress.advance(1)
        others = [
            (trial.shape.op, request, trial.tactics[trial.ranking[0]])
            for trial in trials
            if trial.ranking
            for request in trial.shape.requests[1:]
        ]
        _compile_all(f"compiling {layer} for other rows", others, compiler, progress)
        chosen += [_chosen(trial, compiler) for trial in trials]
    return [entry for entry, _ in chosen], [shape for _, shape in chosen]


@dataclass(frozen=True)
class _Trial:
    """What was measured of a shape's usable tactics; ``ranking`` are those to be preferred."""

    shape: Shape
    tactics: tuple[Tactic, ...]
    sources: tuple[str, ...]
    measured: tuple[Measured, ...]
    dropped: tuple[Dropped, ...]

    @property
    def ranking(self) -> list[int]:
        return fastest(self.measured)


def _measured(
    shape: Shape, compiler: Compiler, timer: CandidateTimer, note: Callable[[str], None]
) -> _Trial:
    """Times the candidates of one shape that compile.

    A default that spills registers gives way to the first that does not, as in a build.
    """
    op, request = shape.op, shape.request
    what = f"{shape.layer} of {shape.rows} rows"
    usable: list[Tactic] = []
    candidates: list[Candidate] = []
    refused: Unsupported | None = None
    cuts = cuts_of(op, request)
    if isinstance(_candidate(shape, cuts, {}, compiler), Unsupported):
        cuts = ()
    for tactic in shape.tactics:
        candidate = _candidate(shape, cuts, tactic, compiler)
        if isinstance(candidate, Candidate):
            usable.append(tactic)
            candidates.append(candidate)
        elif usable or isinstance(candidate, Spills):
            note(f"{what}: {dict(tactic)} is left out: {candidate.reason}")
            refused = candidate
        else:
            require(candidate)
    if not usable:
        require(refused)
    measured = timer.measure(op, request, candidates)
    if measured[0].differing:
        note(f"{what}: cut, the default differs from itself in {measured[0].differing} values")
    dropped = []
    for tactic, found in zip(usable[1:], measured[1:], strict=True):
        if found.differing != 0:
            dropped.append(Dropped(dict(tactic), _fault(found)))
            note(f"{what}: {dict(tactic)} is dropped: {dropped[-1].reason}")
    kernels = [launch.kernel for candidate in candidates for launch in candidate.whole.launches]
    sources = sorted({f"{kernel.folder}/{kernel.file}" for kernel in kernels})
    return _Trial(shape, tuple(usable), tuple(sources), tuple(measured), tuple(dropped))


def _candidate(
    shape: Shape, cuts: Sequence[Cut], tactic: Tactic, compiler: Compiler
) -> Candidate | Unsupported:
    """The launches of a tactic, whole and cut, or why some of them may not run."""
    lowered: list[tuple[Lowering, ...]] = []
    for requests in ([shape.request], *([piece.request for piece in cut] for cut in cuts)):
        of_cut: list[Lowering] = []
        for request in requests:
            lowering = shape.op.lowered(replace(request, tactic=tactic))
            if isinstance(lowering, Unsupported):
                return lowering
            refused = _refusal(lowering, compiler)
            if refused is not None:
                return refused
            of_cut.append(lowering)
        lowered.append(tuple(of_cut))
    ((whole,), *pieces) = lowered
    return Candidate(whole, tuple(pieces))


def _fault(found: Measured) -> str:
    if found.differing is None or not math.isfinite(max(found.us)):
        return "fails"
    return f"differs from the default in {found.differing} values"


def _chosen(trial: _Trial, compiler: Compiler) -> tuple[TacticEntry, TunedShape]:
    """The best tactic that suits every request of the shape; its code is not looked up yet."""
    shape, request = trial.shape, trial.shape.request
    suitable = (i for i in trial.ranking if _suits_all(shape, trial.tactics[i], compiler))
    best = next(suitable, 0)
    tactic = dict(trial.tactics[best])
    best_us, default_us = (round(trial.measured[i].us[0], 3) for i in (best, 0))
    entry = TacticEntry(
        op=shape.op.name,
        phase=request.phase,
        shapes=shape_key(shape.op, request.tensors),
        attributes=dict(request.attributes),
        sources=trial.sources,
        tactic=tactic,
        median_us=best_us,
        default_us=default_us,
        code="",
        compiler="",
    )
    counts = (shape.rows, len(shape.tactics))
    times = (best_us, default_us)
    told = TunedShape(shape.op.name, request.phase, *counts, tactic, *times, trial.dropped)
    return entry, told


def _suits_all(shape: Shape, tactic: Tactic, compiler: Compiler) -> bool:
    """Whether the tactic compiles for every request that shares the entry and knows it."""
    assert shape.op.tactics is not None
    for request in shape.requests:
        if tactic in shape.op.tactics(request):
            found = compiler.compile(_kernels(shape.op, request, tactic), lambda: None)
            if isinstance(found, Unsupported):
                return False
    return True


def _refusal(lowering: Lowering, compiler: Compiler) -> Unsupported | None:
    """Why the launches have no machine code that may run; None where they have."""
    found = compiler.compile([launch.kernel for launch in lowering.launches], lambda: None)
    return found if isinstance(found, Unsupported) else None


def _kernels(op: OpSpec, request: LoweringRequest, tactic: Tactic) -> list[Kernel]:
    """What a tactic launches; nothing where no kernel takes the request."""
    found = op.lowered(replace(request, tactic=tactic))
    return [] if isinstance(found, Unsupported) else [launch.kernel for launch in found.launches]


def _compile_all(
    stage: str,
    wanted: Sequence[tuple[OpSpec, LoweringRequest, Tactic]],
    compiler: Compiler,
    progress: Progress,
) -> None:
    """Compiles kernels side by side; what fails is told where it is used."""
    kernels: list[Kernel] = []
    for op, request, tactic in wanted:
        kernels += _kernels(op, request, tactic)
    missing = len(compiler.missing(kernels))
    if not missing:
        return
    progress.start(stage, missing, "source")
    compiler.compile(kernels, lambda: progress.advance(1))
