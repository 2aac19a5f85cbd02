"""SpecPV where steps stay on the device: the host says which sequences take a full step.

It says so before it knows what the steps in flight emitted, and so reckons with the most that they
can have. Full steps re-verify tokens, for which a launch has limited capacity: sequences that will
need it at the same time take turns early.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.engine_dir.plan import FULL_STEP
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.executor import DeviceExecutor, StepResult
from specbuild.runtime.lossy.mode import ModeRequest, StepAhead
from specbuild.runtime.lossy.specpv.host_tables import begun_view, table_shape, view_geometry
from specbuild.runtime.lossy.specpv.state import (
    SequenceView,
    SpecPvCounters,
    StepChoice,
    ViewGeometry,
)
from specbuild.runtime.request import SequenceState


@dataclass
class _Lagged:
    """A sequence as the host knows it, and its steps in flight with the most that each emits."""

    view: SequenceView
    length: int
    flights: deque[tuple[StepChoice, int]] = field(default_factory=deque)

    def ahead(self) -> tuple[SequenceView, int]:
        """The state and length behind the steps in flight, if each emits all that it can."""
        view, length = copy.copy(self.view), self.length
        view.counters = SpecPvCounters()
        for choice, most in self.flights:
            view.committed(_at(view, choice, length), length, length + most)
            length += most
        return view, length


@dataclass(frozen=True)
class _Candidate:
    """A sequence before a step: what it would do alone, and the most that it would re-verify."""

    row: int
    choice: StepChoice
    buffered: int
    due: bool

    @property
    def urgency(self) -> tuple[bool, int]:
        """Those that cannot wait go first, then those with most to re-verify."""
        return not self.choice.partial, self.buffered


class RefreshCapacity(Protocol):
    """How many rows of a step can verify tokens again: what a plan's programs are made for."""

    def refresh_capacity(self, shape: DraftShape | None, *, batch: int) -> int:
        """The most rows, for so many sequences."""
        ...


class DeviceViews:
    """Views of the sequences of one generation, by their index."""

    def __init__(
        self, executor: DeviceExecutor, manifest: Manifest, programs: RefreshCapacity
    ) -> None:
        geometry = view_geometry(manifest)
        assert geometry is not None
        self._executor = executor
        self._programs = programs
        self._geometry: ViewGeometry = geometry
        self._layers = table_shape(manifest, geometry)[0]
        self._held: dict[int, _Lagged] = {}
        self._flags: np.ndarray | None = None

    def begin(self, sequence: SequenceState, row: int) -> None:
        """Prefill is through: everything is exact, nothing summarised or chosen."""
        prompt = len(sequence.request.prompt_ids)
        view = begun_view(self._geometry, self._layers, sequence)
        self._held[sequence.index] = _Lagged(view, prompt)
        values = {"verified_len": prompt, "view_blocks": -1, "summarised": 0, "budget": view.budget}
        for name, value in values.items():
            self._executor.fill(name, value, row=row)

    def release(self, sequence: SequenceState) -> None:
        """The sequence is done; rows may have moved."""
        self._held.pop(sequence.index, None)
        self._flags = None

    def expected(self, ahead: StepAhead) -> ModeRequest:
        """Steps are partial at first, or see everything by the program that chooses no view."""
        del ahead
        return ModeRequest()

    def plan(self, ahead: StepAhead) -> ModeRequest:
        """What each row's sequence does in the next step; the device is told.

        Raises SpecbuildError where the program has too few rows for what must be verified again.
        """
        nodes, most = _sizes(ahead.shape)
        capacity = self._programs.refresh_capacity(ahead.shape, batch=ahead.batch)
        found = [self._candidate(row, s, nodes, most, capacity, len(ahead.rows))
                 for row, s in ahead.rows.items()]  # fmt: skip
        full = {c.row for c in found if not c.choice.partial and c.buffered == 0}
        left = capacity
        for c in sorted(found, key=lambda c: c.urgency, reverse=True):
            if c.row in full or (c.choice.partial and not c.due):
                continue
            if c.buffered <= left:
                full.add(c.row)
                left -= c.buffered
            elif not c.choice.partial:
                raise SpecbuildError(
                    f"SpecPV: a full step must feed {c.buffered} tokens again, with capacity for "
                    f"{left}; build with a larger --specpv-n-spec-tokens-buf or a smaller "
                    "--max-batch-size"
                )
        choices = {c.row: self._settled(c, c.row in full) for c in found}
        flags = np.zeros(ahead.batch, np.int32)
        for row, choice in choices.items():
            self._held[ahead.rows[row].index].flights.append((choice, most))
            flags[row] = not choice.partial
        self._tell(flags)
        # Views are chosen, and re-verified tokens, in programs of their own.
        chosen = any(choice.blocks is not None for choice in choices.values())
        return ModeRequest(capacity - left if chosen or left < capacity else None)

    def received(
        self, sequence: SequenceState, plan: ModeRequest, result: StepResult, row: int
    ) -> None:
        """The oldest step in flight is through; what it verified again is counted."""
        held, emitted = self._held[sequence.index], result.count[row]
        if plan.reverified is not None:
            held.view.counters.recheck(result.rechecked[row], result.agreed[row])
        choice, _ = held.flights.popleft()
        choice = _at(held.view, choice, held.length)
        held.view.log_fallback(choice, sequence.request.id, held.length)
        held.view.committed(choice, held.length, held.length + emitted)
        held.length += emitted

    def _candidate(  # noqa: PLR0917
        self, row: int, sequence: SequenceState, nodes: int, most: int, capacity: int, batch: int
    ) -> _Candidate:
        held = self._held[sequence.index]
        view, length = held.ahead()
        choice = view.choose(length, nodes)
        held.view.counters.invariant_failures += view.counters.invariant_failures
        config = self._geometry.config
        buffered = length - min(view.global_verified_len, length)
        at_once = max(1, capacity // config.n_spec_tokens_buf)
        lead = -(-batch // at_once) - 1
        due = (
            buffered + nodes + 1 + lead * most > config.n_spec_tokens_buf
            or view.partial_steps >= config.full_refresh_interval - lead
        )
        return _Candidate(row, choice, buffered, due and buffered > 0)

    def _settled(self, candidate: _Candidate, full: bool) -> StepChoice:
        choice = candidate.choice
        if not full or not choice.partial:
            return choice
        # Its turn comes early.
        return StepChoice(False, choice.chain_start - candidate.buffered, None, "refresh interval")

    def _tell(self, flags: np.ndarray) -> None:
        if self._flags is None or not np.array_equal(flags, self._flags):
            self._executor.write(FULL_STEP, flags)
            self._flags = flags


def _at(view: SequenceView, choice: StepChoice, length: int) -> StepChoice:
    """What a step does at a length that was not known when it was chosen, as the device does it."""
    return choice if choice.partial else replace(choice, blocks=view.blocks_at(length))


def _sizes(shape: DraftShape | None) -> tuple[int, int]:
    """Nodes of a step's tree below the root, and the most tokens that it emits."""
    if shape is None:
        return 0, 1
    return shape.draft_tokens, min(shape.draft_depth, shape.draft_tokens) + 1
