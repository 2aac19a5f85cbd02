"""The tactics that a build looks up: a file that the user gave, or the one that is shipped."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler, target_of
from specbuild.builder.backends.cuda.tactics.measured_code import MeasuredCode
from specbuild.builder.backends.cuda.tactics.tactic_file import (
    REMEDY,
    TacticEntry,
    TacticFile,
    read_tactics,
    request_key,
    tactic_file,
)
from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    Tactic,
    Unsupported,
)
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.runtime.errors import SpecbuildError

SHIPPED_FOLDER = Path(__file__).parent
# What is read where no file is given: measured on an H200.
SHIPPED_FILES = {"sm_90a": "h200.json"}


@dataclass(frozen=True)
class TacticBook:
    """The entries of a file whose ``name`` is for reports.

    ``code`` compares those of ``stale`` sources with the kernels that are here; without it all
    hold. ``must_hold``: one that does not is an error, and is not only left out.
    """

    file: TacticFile
    name: str
    code: MeasuredCode | None = None
    stale: frozenset[str] = field(default_factory=frozenset)
    must_hold: bool = False

    @cached_property
    def _entries(self) -> dict[str, TacticEntry]:
        return {entry.key: entry for entry in self.file.entries}

    def entry(self, op: OpSpec, request: LoweringRequest) -> TacticEntry | None:
        """What was measured at the request's shapes."""
        return self._entries.get(request_key(op, request))

    def refusal(self, entry: TacticEntry) -> Unsupported | None:
        """Why an entry does not hold for the kernels that are here, None where it does.

        Raises SpecbuildError where it must.
        """
        if self.code is None or not self.stale.intersection(entry.sources):
            return None
        refused = self.code.refusal(entry)
        if refused is not None and self.must_hold:
            raise SpecbuildError(
                f"{self.name}: {refused.reason}; {REMEDY} or build without --tactics"
            )
        return refused

    def without(self, entries: Iterable[TacticEntry]) -> TacticBook:
        """The book less these."""
        left_out = {entry.key for entry in entries}
        kept = [entry for key, entry in self._entries.items() if key not in left_out]
        return replace(self, file=tactic_file(self.file.gpu, self.file.device, kept))


@dataclass(frozen=True)
class Choice:
    """How a call is lowered. ``request`` has the tactic, ``entry`` is where it comes from."""

    op: OpSpec
    request: LoweringRequest
    candidates: tuple[Tactic, ...]
    entry: TacticEntry | None
    lowering: Lowering

    @property
    def tunable(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.candidates) > 1

    def launches_any(self, kernels: Collection[Kernel]) -> bool:
        """Whether it launches one of these kernels."""
        return any(launch.kernel in kernels for launch in self.lowering.launches)


@dataclass(frozen=True)
class TacticsReport:
    """Which of an engine's shapes and launches with several candidates were measured.

    ``file`` is the tactic file's name, ``device`` the GPU that it was measured on.
    """

    file: str
    device: str
    shapes: int = 0
    tuned_shapes: int = 0
    launches: int = 0
    tuned_launches: int = 0


def no_tactics(gpu: str) -> TacticBook:
    """An empty book: defaults everywhere."""
    return TacticBook(tactic_file(gpu, "", ()), "")


def tactics_from_file(path: Path, gpu: str) -> TacticBook:
    """The book of ``--tactics FILE``, in which entries of other kernels are errors.

    Raises SpecbuildError where it is no tactic file, or of another GPU.
    """
    file = read_tactics(path)
    if file.gpu != gpu:
        raise SpecbuildError(
            f"{path} was measured for {file.gpu} ({file.device}), the engine is built for {gpu}; "
            "give the tactics of that GPU"
        )
    return replace(_book(file, path.name), must_hold=True)


def shipped_tactics(gpu: str) -> TacticBook:
    """The book that specbuild ships for a GPU; entries of other kernels are left out by name."""
    name = SHIPPED_FILES.get(gpu)
    if name is None:
        return no_tactics(gpu)
    return _book(read_tactics(SHIPPED_FOLDER / name), name)


def _book(file: TacticFile, name: str) -> TacticBook:
    code = MeasuredCode(target_of(file.gpu), Compiler(file.gpu))
    return TacticBook(file, name, code, frozenset(file.stale_sources()))


def tactics_report(book: TacticBook, choices: Iterable[Choice]) -> TacticsReport:
    """Counts the calls of all programs, one :class:`Choice` for each."""
    shapes: dict[str, bool] = {}
    launches = tuned_launches = 0
    for choice in choices:
        if not choice.tunable:
            continue
        tuned = choice.entry is not None
        shapes[request_key(choice.op, choice.request)] = tuned
        count = len(choice.lowering.launches)
        launches += count
        tuned_launches += count * tuned
    return TacticsReport(
        file=book.name,
        device=book.file.device,
        shapes=len(shapes),
        tuned_shapes=sum(shapes.values()),
        launches=launches,
        tuned_launches=tuned_launches,
    )


def require_tuned(book: TacticBook, choices: Iterable[Choice]) -> None:
    """SpecbuildError that lists the shapes without an entry, if there are any."""
    untuned = {
        request_key(choice.op, choice.request): choice
        for choice in choices
        if choice.tunable and choice.entry is None
    }
    if not untuned:
        return
    rows: dict[str, set[int]] = {}
    for choice in untuned.values():
        rows.setdefault(layer_of(choice.op, choice.request), set()).add(rows_of(choice.request))
    listed = "; ".join(
        f"{layer} at {', '.join(map(str, sorted(counts)))} rows" for layer, counts in rows.items()
    )
    raise SpecbuildError(
        f"--tuned-only: {len(untuned)} shapes have no entry in {book.name or 'any tactic file'}: "
        f"{listed}; build without --tuned-only, run specbuild tune on the engine and give its file "
        "by --tactics"
    )


def rows_of(request: LoweringRequest) -> int:
    """Rows of a launch: those of the activations that the op reads."""
    return next(
        request.tensors[name] for name in ("x", "q", "rows") if name in request.tensors
    ).shape[0]


def layer_of(op: OpSpec, request: LoweringRequest) -> str:
    """An op, its phase and what tells its layers apart: its largest weight, its window."""
    weights = [
        info
        for name, info in request.tensors.items()
        if op.tensor(name).dtype == "W" and len(info.shape) > 1
    ]
    largest = max(weights, key=lambda info: info.nbytes, default=None)
    told = [] if largest is None else ["×".join(map(str, largest.shape))]
    if request.attributes.get("window"):
        told.append(f"window {request.attributes['window']}")
    return " ".join([op.name, *told, request.phase])
