"""The tactics that a build uses: a file of the user, or the one shipped for the GPU."""

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
# The default tactics by architecture, measured on an H200.
SHIPPED_FILES = {"sm_90a": "h200.json"}


@dataclass(frozen=True)
class TacticBook:
    """The entries of a tactic file; ``name`` is its name in reports.

    ``code`` compares entries of ``stale`` sources with the current kernels; without it all entries
    are valid. With ``is_strict`` an invalid entry is an error, otherwise it is left out.
    """

    file: TacticFile
    name: str
    code: MeasuredCode | None = None
    stale: frozenset[str] = field(default_factory=frozenset)
    is_strict: bool = False

    @cached_property
    def _entries(self) -> dict[str, TacticEntry]:
        return {entry.key: entry for entry in self.file.entries}

    def entry(self, op: OpSpec, request: LoweringRequest) -> TacticEntry | None:
        """Return the entry measured at the request's shapes, or None."""
        return self._entries.get(request_key(op, request))

    def refusal(self, entry: TacticEntry) -> Unsupported | None:
        """Return why an entry is invalid for the current kernels, or None if it is valid.

        Raises SpecbuildError for an invalid entry of a strict book.
        """
        if self.code is None or not self.stale.intersection(entry.sources):
            return None
        refused = self.code.refusal(entry)
        if refused is not None and self.is_strict:
            raise SpecbuildError(
                f"{self.name}: {refused.reason}; {REMEDY} or build without --tactics"
            )
        return refused

    def without(self, entries: Iterable[TacticEntry]) -> TacticBook:
        """Return the book without these entries."""
        left_out = {entry.key for entry in entries}
        remaining = [entry for key, entry in self._entries.items() if key not in left_out]
        return replace(self, file=tactic_file(self.file.gpu, self.file.device, remaining))


@dataclass(frozen=True)
class Choice:
    """The lowering of a call. ``request`` has the tactic, ``entry`` is its origin."""

    op: OpSpec
    request: LoweringRequest
    candidates: tuple[Tactic, ...]
    entry: TacticEntry | None
    lowering: Lowering

    @property
    def tunable(self) -> bool:
        """Whether there are several candidates."""
        return len(self.candidates) > 1

    def launches_any(self, kernels: Collection[Kernel]) -> bool:
        """Return whether it launches one of these kernels."""
        return any(launch.kernel in kernels for launch in self.lowering.launches)


@dataclass(frozen=True)
class TacticsReport:
    """Counts of an engine's shapes and launches with several candidates, and of tuned ones.

    ``file`` is the tactic file's name, ``device`` the GPU on which it was measured.
    """

    file: str
    device: str
    shapes: int = 0
    tuned_shapes: int = 0
    launches: int = 0
    tuned_launches: int = 0


def no_tactics(gpu: str) -> TacticBook:
    """Return an empty book, which selects defaults."""
    return TacticBook(tactic_file(gpu, "", ()), "")


def tactics_from_file(path: Path, gpu: str) -> TacticBook:
    """Return the book of ``--tactics FILE``, in which entries of other kernels are errors.

    Raises SpecbuildError if it is not a tactic file, or of another GPU.
    """
    file = read_tactics(path)
    if file.gpu != gpu:
        raise SpecbuildError(
            f"{path} was measured for {file.gpu} ({file.device}), but the engine is built for "
            f"{gpu}; use tactics for that GPU"
        )
    return replace(_book(file, path.name), is_strict=True)


def shipped_tactics(gpu: str) -> TacticBook:
    """Return the book that specbuild ships for a GPU; entries of other kernels are left out."""
    name = SHIPPED_FILES.get(gpu)
    if name is None:
        return no_tactics(gpu)
    return _book(read_tactics(SHIPPED_FOLDER / name), name)


def _book(file: TacticFile, name: str) -> TacticBook:
    code = MeasuredCode(target_of(file.gpu), Compiler(file.gpu))
    return TacticBook(file, name, code, frozenset(file.stale_sources()))


def tactics_report(book: TacticBook, choices: Iterable[Choice]) -> TacticsReport:
    """Count the calls of all programs, with one :class:`Choice` per call."""
    shapes: dict[str, bool] = {}
    launches = tuned_launches = 0
    for choice in choices:
        if not choice.tunable:
            continue
        is_tuned = choice.entry is not None
        shapes[request_key(choice.op, choice.request)] = is_tuned
        count = len(choice.lowering.launches)
        launches += count
        tuned_launches += count * is_tuned
    return TacticsReport(
        file=book.name,
        device=book.file.device,
        shapes=len(shapes),
        tuned_shapes=sum(shapes.values()),
        launches=launches,
        tuned_launches=tuned_launches,
    )


def require_tuned(book: TacticBook, choices: Iterable[Choice]) -> None:
    """Raise SpecbuildError with all shapes that have no entry."""
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
        f"{listed}; build without --tuned-only, run specbuild tune on the engine and pass its file "
        "with --tactics"
    )


def rows_of(request: LoweringRequest) -> int:
    """Return the rows of a launch: those of the op's activations."""
    return next(
        request.tensors[name] for name in ("x", "q", "rows") if name in request.tensors
    ).shape[0]


def layer_of(op: OpSpec, request: LoweringRequest) -> str:
    """Return a title for an op's layers: op, largest weight, window and phase."""
    weights = [
        info
        for name, info in request.tensors.items()
        if op.tensor(name).dtype == "W" and len(info.shape) > 1
    ]
    largest = max(weights, key=lambda info: info.nbytes, default=None)
    details = [] if largest is None else ["×".join(map(str, largest.shape))]
    if request.attributes.get("window"):
        details.append(f"window {request.attributes['window']}")
    return " ".join([op.name, *details, request.phase])
