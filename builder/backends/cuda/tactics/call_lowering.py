"""Lowers calls by tactics, and avoids kernels that an engine must not launch."""

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

Result = TypeVar("Result")


class CallLowering:
    """Lowers calls for one GPU by a book of tactics. Equal calls are lowered once.

    ``refused`` are kernels that must not be launched. If the default tactic of a call launches one,
    the first candidate without such kernels is used. ``left_out`` has the reasons for unused
    kernels, and for entries that were measured with other kernels.
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
        self._outdated_entries: dict[str, Unsupported] = {}
        self._target = target
        self._refused = refused
        self.tactics = tactics or no_tactics(target.arch)
        self._choices: dict[str, Choice | Unsupported] = {}

    def __call__(self, call: Call, phase: ProgramPhase) -> Lowering | Unsupported:
        """Return the lowering, or why the op has none for these sizes."""
        choice = self._choice_or_reason(call, phase)
        return choice if isinstance(choice, Unsupported) else choice.lowering

    def choice(self, call: Call, phase: ProgramPhase) -> Choice:
        """Return the lowering with its tactic. SpecbuildError if there is none."""
        choice = self._choice_or_reason(call, phase)
        if isinstance(choice, Unsupported):
            raise SpecbuildError(choice.reason)
        return choice

    def _choice_or_reason(self, call: Call, phase: ProgramPhase) -> Choice | Unsupported:
        """Return the choice. A short prompt chunk without prefill kernels uses decode kernels."""
        choice = self._choice(call, phase)
        if phase != "prefill" or not isinstance(choice, Unsupported):
            return choice
        infos = _infos(call)
        rows = max((infos[name].shape[0] for name in ("x", "q") if name in infos), default=0)
        return choice if rows > MAX_DECODE_ROWS else self._choice(call, "decode")

    @property
    def left_out(self) -> tuple[Unsupported, ...]:
        """The reasons for unused kernels and entries of the book."""
        return (*self._left_out, *self._outdated_entries.values())

    def choices(self, programs: Iterable[LoweredProgram]) -> list[Choice]:
        """Return the choice for every call of the programs."""
        return [self.choice(call, p.ir.phase) for p in programs for call in p.ir.calls]

    def entries_of(self, kernels: Collection[Kernel]) -> list[TacticEntry]:
        """Return the entries with which calls launch any of these kernels."""
        return [
            choice.entry
            for choice in self._choices.values()
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
        if key not in self._choices:
            self._choices[key] = self._choose(call.op, request)
        return self._choices[key]

    def _choose(self, op: OpSpec, request: LoweringRequest) -> Choice | Unsupported:
        default = op.lowered(request)
        if isinstance(default, Unsupported):
            return default
        assert op.lower is not None
        candidates = op.tactics(request) if op.tactics is not None else ({},)
        entry = self.tactics.entry(op, request) if len(candidates) > 1 else None
        # An entry covers several numbers of rows. Small ones may not support its tactic.

        if entry is not None and entry.tactic and entry.tactic not in candidates:
            entry = None
        if entry is not None:
            refused = self.tactics.refusal(entry)
            if refused is not None:
                self._outdated_entries[entry.key] = refused
                entry = None
        if entry is None or not entry.tactic:
            return self._without_refused(Choice(op, request, candidates, entry, default))
        tuned = replace(request, tactic=entry.tactic)
        return Choice(op, tuned, candidates, entry, op.lower(tuned))

    def _without_refused(self, default: Choice) -> Choice:
        """Return the first candidate without a refused kernel, or the default if all have one."""
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
    target: Target, tactics: TacticBook, build: Callable[[CallLowering], Result | Unsupported]
) -> tuple[CallLowering, Result]:
    """Return the result of ``build`` without spilling kernels, and the lowering used for it.

    An entry covers several numbers of rows, and its tactic can spill registers at some that were
    not measured. Entries with which hot kernels spill are removed. A spilling default is replaced
    by another candidate. ``left_out`` of the lowering lists both. Raises SpecbuildError if all
    candidates spill, and like ``build``.
    """
    refused: frozenset[Kernel] = frozenset()
    left_out: list[Unsupported] = []
    while True:
        lowering = CallLowering(target, tactics, refused, left_out=tuple(left_out))
        result = build(lowering)
        if not isinstance(result, Unsupported):
            return lowering, result
        if not isinstance(result, Spills):
            raise SpecbuildError(result.reason)
        spilling = lowering.entries_of(result.kernels)
        if not spilling and result.kernels <= refused:
            raise SpecbuildError(result.reason)
        left_out.append(Unsupported(result.reason))
        tactics = tactics.without(spilling)
        refused |= result.kernels


def _infos(call: Call) -> dict[str, TensorInfo]:
    return {name: tensor.info for name, tensor in call.tensors.items()}
