"""Lowers calls by a book of tactics, and leaves out what an engine's kernels cannot take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TypeVar

from specbuild.builder.backends.cuda.compile.nvrtc import Spills
from specbuild.builder.backends.cuda.plan.plan_writer import LoweredProgram
from specbuild.builder.backends.cuda.step.ir import Call
from specbuild.builder.backends.cuda.tactics.tactic_book import Choice, TacticBook, no_tactics
from specbuild.builder.backends.cuda.tactics.tactic_file import TacticEntry
from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    Phase,
    ProgramPhase,
    Target,
    TensorInfo,
    Unsupported,
)
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.runtime.errors import SpecbuildError

Made = TypeVar("Made")


class CallLowering:
    """Lowers calls for one GPU by a book of tactics; equal calls are lowered once.

    ``refused``: kernels that must not be launched. A call whose default tactic does takes its
    first candidate that does not. ``left_out`` gives the reason kernels are, and that of entries
    which were measured with other kernels.
    """

    def __init__(
        self,
        target: Target,
        tactics: TacticBook | None = None,
        refused: frozenset[Kernel] = frozenset(),
        *,
        left_out: tuple[Unsupported, ...] = (),
    ) -> None:
        self._left_out = left_out
        self._of_other_kernels: dict[str, Unsupported] = {}
        self._target = target
        self._refused = refused
        self.tactics = tactics or no_tactics(target.arch)
        self._known: dict[str, Choice | Unsupported] = {}

    def __call__(self, call: Call, phase: ProgramPhase) -> Lowering | Unsupported:
        """The launches, or why the op has none for these sizes."""
        found = self._found(call, phase)
        return found if isinstance(found, Unsupported) else found.lowering

    def choice(self, call: Call, phase: ProgramPhase) -> Choice:
        """The launches and why these. Raises SpecbuildError where there are none."""
        found = self._found(call, phase)
        if isinstance(found, Unsupported):
            raise SpecbuildError(found.reason)
        return found

    def _found(self, call: Call, phase: ProgramPhase) -> Choice | Unsupported:
        """An op without kernels for a prompt chunk takes those that decode, within their rows."""
        found = self._choice(call, phase)
        if phase != "prefill" or not isinstance(found, Unsupported):
            return found
        named = _infos(call)
        most = max((named[name].shape[0] for name in ("x", "q") if name in named), default=0)
        return found if most > MAX_DECODE_ROWS else self._choice(call, "decode")

    @property
    def left_out(self) -> tuple[Unsupported, ...]:
        """Why kernels and entries of the book are not used."""
        return (*self._left_out, *self._of_other_kernels.values())

    def choices(self, programs: Iterable[LoweredProgram]) -> list[Choice]:
        """What was chosen for every call of some programs."""
        return [self.choice(call, p.ir.phase) for p in programs for call in p.ir.calls]

    def entries_of(self, kernels: Collection[Kernel]) -> list[TacticEntry]:
        """The entries by which calls launch some of these kernels."""
        return [
            choice.entry
            for choice in self._known.values()
            if not isinstance(choice, Unsupported)
            and choice.entry is not None
            and choice.request.tactic
            and choice.launches_any(kernels)
        ]

    def _choice(self, call: Call, phase: ProgramPhase) -> Choice | Unsupported:
        kernels: Phase = "prefill" if phase == "prefill" else "decode"
        request = LoweringRequest(
            _infos(call), call.attributes, kernels, self._target, uneven=phase == "refresh"
        )
        key = repr((call.op.name, request))
        if key not in self._known:
            self._known[key] = self._chosen(call.op, request)
        return self._known[key]

    def _chosen(self, op: OpSpec, request: LoweringRequest) -> Choice | Unsupported:
        default = op.lowered(request)
        if isinstance(default, Unsupported):
            return default
        assert op.lower is not None
        candidates = op.tactics(request) if op.tactics is not None else ({},)
        entry = self.tactics.entry(op, request) if len(candidates) > 1 else None
        # An entry stands for several counts of rows; a few may not know its tactic.
        if entry is not None and entry.tactic and entry.tactic not in candidates:
            entry = None
        if entry is not None:
            refused = self.tactics.refusal(entry)
            if refused is not None:
                self._of_other_kernels[entry.key] = refused
                entry = None
        if entry is None or not entry.tactic:
            return self._unrefused(Choice(op, request, candidates, entry, default))
        tuned = replace(request, tactic=entry.tactic)
        return Choice(op, tuned, candidates, entry, op.lower(tuned))

    def _unrefused(self, default: Choice) -> Choice:
        """By the first candidate without a refused kernel; the default where every one has some."""
        if not default.launches_any(self._refused):
            return default
        lower = default.op.lower
        assert lower is not None
        for tactic in default.candidates[1:]:
            request = replace(default.request, tactic=tactic)
            choice = replace(default, request=request, lowering=lower(request), entry=None)
            if not choice.launches_any(self._refused):
                return choice
        return default


def without_spills(
    target: Target, tactics: TacticBook, make: Callable[[CallLowering], Made | Unsupported]
) -> tuple[CallLowering, Made]:
    """What ``make`` gives by these tactics, and the lowering that it was made with.

    The lowering's ``left_out`` says which kernels gave way.

    An entry stands for several counts of rows, and a tactic may spill registers at some that were
    not measured: entries by which hot kernels do so are left out. A default that does gives way to
    another candidate. Raises SpecbuildError where every one spills, and as ``make`` does.
    """
    refused: frozenset[Kernel] = frozenset()
    left_out: list[Unsupported] = []
    while True:
        lowering = CallLowering(target, tactics, refused, left_out=tuple(left_out))
        made = make(lowering)
        if not isinstance(made, Unsupported):
            return lowering, made
        if not isinstance(made, Spills):
            raise SpecbuildError(made.reason)
        spilling = lowering.entries_of(made.kernels)
        if not spilling and made.kernels <= refused:
            raise SpecbuildError(made.reason)
        left_out.append(Unsupported(made.reason))
        tactics = tactics.without(spilling)
        refused |= made.kernels


def _infos(call: Call) -> dict[str, TensorInfo]:
    return {name: tensor.info for name, tensor in call.tensors.items()}
