"""Selects the fastest tactic of each shape: what is timed, and the rule of selection."""

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
from specbuild.builder.backends.cuda.tuning.timer import Candidate, CandidateTimer, Measurement
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

# A candidate must be this much faster than the default on average, and at most this much slower in
# any setting.
MARGIN = 0.02


@dataclass(frozen=True)
class Shape:
    """Requests that share an entry. The one with the most rows is measured."""

    op: OpSpec
    requests: tuple[LoweringRequest, ...]

    @property
    def request(self) -> LoweringRequest:
        """The measured request."""
        return self.requests[0]

    @property
    def tactics(self) -> tuple[Tactic, ...]:
        """The candidates; the first is the default, which can differ between numbers of rows."""
        assert self.op.tactics is not None
        return ({}, *self.op.tactics(self.request)[1:])

    @property
    def cut_requests(self) -> list[LoweringRequest]:
        """The requests of the pieces when the prompt chunk is cut."""
        return [piece.request for cut in cuts_of(self.op, self.request) for piece in cut]

    @property
    def rows(self) -> int:
        """The rows of the measured request."""
        return rows_of(self.request)

    @property
    def key(self) -> str:
        """The key of the entry."""
        return request_key(self.op, self.request)

    @property
    def layer(self) -> str:
        """The title of the layer, equal for layers with the same weights."""
        return layer_of(self.op, self.request)


@dataclass(frozen=True)
class Dropped:
    """A measured candidate that must not be used."""

    tactic: dict[str, int]
    reason: str


@dataclass(frozen=True)
class TunedShape:
    """A measured shape; ``tactic`` is empty if the default is the fastest."""

    op: str
    phase: str
    rows: int
    candidates: int
    tactic: dict[str, int]
    median_us: float
    default_us: float
    dropped: tuple[Dropped, ...] = ()


def shapes_of(source: ReadPlan, target: Target) -> list[Shape]:
    """Return every shape of the programs with several tactics, by layer, then by rows."""
    lowering = CallLowering(target)
    requests: dict[str, tuple[OpSpec, dict[str, LoweringRequest]]] = {}
    for _, program in source.programs:
        for call in program.calls:
            choice = lowering.choice(call, program.phase)
            if choice.tunable:
                key = request_key(choice.op, choice.request)
                _, group = requests.setdefault(key, (choice.op, {}))
                group.setdefault(repr(choice.request), choice.request)
    shapes = [
        Shape(op, tuple(sorted(group.values(), key=rows_of, reverse=True)))
        for op, group in requests.values()
    ]
    return sorted(shapes, key=lambda s: (s.request.phase, s.layer, rows_of(s.request)))


def shape_of(entry: TacticEntry, target: Target) -> Shape | Unsupported:
    """Return the shape of an entry, or why this version has no such op."""
    request = entry_request(replace(entry, tactic={}), target)
    if isinstance(request, Unsupported):
        return request
    return Shape(op_named(entry.op), (request,))


def fastest(measured: Sequence[Measurement]) -> list[int]:
    """Return the candidates faster than the default, by the mean ratio over settings."""
    default = measured[0].us
    ranked = []
    for index, candidate in enumerate(measured[1:], 1):
        ratios = [us / base for us, base in zip(candidate.us, default, strict=True)]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        if candidate.differing == 0 and mean < 1 - MARGIN and max(ratios) <= 1 + MARGIN:
            ranked.append((mean, index))
    return [index for _, index in sorted(ranked)]


def default_kernels(shapes: Iterable[Shape]) -> Iterator[Kernel]:
    """Return the kernels that the shapes launch by default."""
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
    """Measure shapes until ``deadline`` (of ``time.monotonic``) and return their entries."""
    layers: dict[str, list[Shape]] = {}
    for shape in shapes:
        layers.setdefault(shape.layer, []).append(shape)
    selected: list[tuple[TacticEntry, TunedShape]] = []
    for layer, layer_shapes in layers.items():
        if time.monotonic() >= deadline:
            break
        candidates = [
            (shape.op, request, tactic)
            for shape in layer_shapes
            for request in (shape.request, *shape.cut_requests)
            for tactic in shape.tactics
        ]
        _compile_all(f"compiling {layer}", candidates, compiler, progress)
        progress.start(f"timing {layer}", len(layer_shapes), "shape")
        trials = []
        for shape in layer_shapes:
            if time.monotonic() >= deadline:
                break
            trials.append(_measure(shape, compiler, timer, progress.note))
            progress.advance(1)
        others = [
            (trial.shape.op, request, trial.tactics[trial.ranking[0]])
            for trial in trials
            if trial.ranking
            for request in trial.shape.requests[1:]
        ]
        _compile_all(f"compiling {layer} for other rows", others, compiler, progress)
        selected += [_select(trial, compiler) for trial in trials]
    return [entry for entry, _ in selected], [shape for _, shape in selected]


@dataclass(frozen=True)
class _Trial:
    """The measurements of a shape's usable tactics; ``ranking`` has the faster ones in order."""

    shape: Shape
    tactics: tuple[Tactic, ...]
    sources: tuple[str, ...]
    measured: tuple[Measurement, ...]
    dropped: tuple[Dropped, ...]

    @property
    def ranking(self) -> list[int]:
        return fastest(self.measured)


def _measure(
    shape: Shape, compiler: Compiler, timer: CandidateTimer, note: Callable[[str], None]
) -> _Trial:
    """Time the candidates of one shape that compile.

    A default that spills registers is replaced by the first candidate that does not, as in a build.
    """
    op, request = shape.op, shape.request
    title = f"{shape.layer} of {shape.rows} rows"
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
            note(f"{title}: {dict(tactic)} is not used: {candidate.reason}")
            refused = candidate
        else:
            require(candidate)
    if not usable:
        require(refused)
    measured = timer.measure(op, request, candidates)
    if measured[0].differing:
        differing = measured[0].differing
        note(f"{title}: the cut default differs from the full default in {differing} values")
    dropped = []
    for tactic, measurement in zip(usable[1:], measured[1:], strict=True):
        if measurement.differing != 0:
            dropped.append(Dropped(dict(tactic), _fault(measurement)))
            note(f"{title}: {dict(tactic)} is dropped: {dropped[-1].reason}")
    kernels = [launch.kernel for candidate in candidates for launch in candidate.full.launches]
    sources = sorted({f"{kernel.folder}/{kernel.file}" for kernel in kernels})
    return _Trial(shape, tuple(usable), tuple(sources), tuple(measured), tuple(dropped))


def _candidate(
    shape: Shape, cuts: Sequence[Cut], tactic: Tactic, compiler: Compiler
) -> Candidate | Unsupported:
    """Return a tactic's lowerings for the full chunk and its pieces, or why one must not run."""
    lowered: list[tuple[Lowering, ...]] = []
    for requests in ([shape.request], *([piece.request for piece in cut] for cut in cuts)):
        pieces_of_cut: list[Lowering] = []
        for request in requests:
            lowering = shape.op.lowered(replace(request, tactic=tactic))
            if isinstance(lowering, Unsupported):
                return lowering
            refused = _refusal(lowering, compiler)
            if refused is not None:
                return refused
            pieces_of_cut.append(lowering)
        lowered.append(tuple(pieces_of_cut))
    ((full,), *pieces) = lowered
    return Candidate(full, tuple(pieces))


def _fault(measurement: Measurement) -> str:
    if measurement.differing is None or not math.isfinite(max(measurement.us)):
        return "fails"
    return f"differs from the default in {measurement.differing} values"


def _select(trial: _Trial, compiler: Compiler) -> tuple[TacticEntry, TunedShape]:
    """Return the entry and report for the best tactic that all requests of the shape support."""
    shape, request = trial.shape, trial.shape.request
    suitable = (i for i in trial.ranking if _is_supported_by_all(shape, trial.tactics[i], compiler))
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
    report = TunedShape(shape.op.name, request.phase, *counts, tactic, *times, trial.dropped)
    return entry, report


def _is_supported_by_all(shape: Shape, tactic: Tactic, compiler: Compiler) -> bool:
    """Return whether the tactic compiles for every request of the entry that supports it."""
    assert shape.op.tactics is not None
    for request in shape.requests:
        if tactic in shape.op.tactics(request):
            compiled = compiler.compile(_kernels(shape.op, request, tactic), lambda: None)
            if isinstance(compiled, Unsupported):
                return False
    return True


def _refusal(lowering: Lowering, compiler: Compiler) -> Unsupported | None:
    """Return why the launches have no permitted machine code, or None if they have."""
    compiled = compiler.compile([launch.kernel for launch in lowering.launches], lambda: None)
    return compiled if isinstance(compiled, Unsupported) else None


def _kernels(op: OpSpec, request: LoweringRequest, tactic: Tactic) -> list[Kernel]:
    """Return the kernels of a tactic; none if no kernel supports the request."""
    lowered = op.lowered(replace(request, tactic=tactic))
    return (
        [] if isinstance(lowered, Unsupported) else [launch.kernel for launch in lowered.launches]
    )


def _compile_all(
    stage: str,
    candidates: Sequence[tuple[OpSpec, LoweringRequest, Tactic]],
    compiler: Compiler,
    progress: Progress,
) -> None:
    """Compile kernels in parallel. Failures are reported at their use."""
    kernels: list[Kernel] = []
    for op, request, tactic in candidates:
        kernels += _kernels(op, request, tactic)
    missing = len(compiler.missing(kernels))
    if not missing:
        return
    progress.start(stage, missing, "source")
    compiler.compile(kernels, lambda: progress.advance(1))
