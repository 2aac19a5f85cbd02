"""SpecPV for steps that stay on the device: the host decides which sequences take a full step.

At that time the host does not know the tokens of the steps in flight, and assumes their maximum. A
launch has a limited number of rows for re-verified tokens. Sequences that would need them at the
same time are therefore refreshed early, in turns.
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
from specbuild.runtime.lossy.specpv.host_tables import new_view, table_shape, view_geometry
from specbuild.runtime.lossy.specpv.state import (
    SequenceView,
    SpecPvCounters,
    StepChoice,
    ViewGeometry,
)
from specbuild.runtime.request import SequenceState


@dataclass
class _SequenceInFlight:
    """A sequence's state as of the last received step, with its steps in flight.

    ``flights`` has the choice of each step and the maximum number of tokens that it emits.
    """

    view: SequenceView
    length: int
    flights: deque[tuple[StepChoice, int]] = field(default_factory=deque)

    def ahead(self) -> tuple[SequenceView, int]:
        """Return the state and length after the steps in flight, if each emits its maximum."""
        view, length = copy.copy(self.view), self.length
        view.counters = SpecPvCounters()
        for choice, max_emitted in self.flights:
            view.committed(_at_length(view, choice, length), length, length + max_emitted)
            length += max_emitted
        return view, length


@dataclass(frozen=True)
class _Candidate:
    """A sequence before a step: its own choice, and the maximum that it would re-verify."""

    row: int
    choice: StepChoice
    buffered: int
    is_due: bool

    @property
    def urgency(self) -> tuple[bool, int]:
        """The sort key: sequences that cannot wait first, then those with the most tokens."""
        return not self.choice.partial, self.buffered


class RefreshCapacity(Protocol):
    """The number of rows for re-verified tokens in the programs of a plan."""

    def refresh_capacity(self, shape: DraftShape | None, *, batch: int) -> int:
        """Return the maximum for this batch."""
        ...


class DeviceViews:
    """The views of the sequences of one generation, by sequence index."""

    def __init__(
        self, executor: DeviceExecutor, manifest: Manifest, programs: RefreshCapacity
    ) -> None:
        geometry = view_geometry(manifest)
        assert geometry is not None
        self._executor = executor
        self._programs = programs
        self._geometry: ViewGeometry = geometry
        self._layers = table_shape(manifest, geometry)[0]
        self._sequences: dict[int, _SequenceInFlight] = {}
        self._flags: np.ndarray | None = None

    def begin(self, sequence: SequenceState, row: int) -> None:
        """Add a sequence after its prefill: all is exact, no block is summarised or selected."""
        prompt = len(sequence.request.prompt_ids)
        view = new_view(self._geometry, self._layers, sequence)
        self._sequences[sequence.index] = _SequenceInFlight(view, prompt)
        values = {"verified_len": prompt, "view_blocks": -1, "summarised": 0, "budget": view.budget}
        for name, value in values.items():
            self._executor.fill(name, value, row=row)

    def release(self, sequence: SequenceState) -> None:
        """Forget a finished sequence; the rows of others may have changed."""
        self._sequences.pop(sequence.index, None)
        self._flags = None

    def expected(self, ahead: StepAhead) -> ModeRequest:
        """Return an empty request: first steps are partial, or select no view."""
        del ahead
        return ModeRequest()

    def request_step(self, ahead: StepAhead) -> ModeRequest:
        """Decide which sequences take a full step, and write this to the device.

        Raises SpecbuildError if the program has too few rows for the tokens to re-verify.
        """
        nodes, max_emitted = _sizes(ahead.shape)
        capacity = self._programs.refresh_capacity(ahead.shape, batch=ahead.batch)
        candidates = [self._candidate(row, s, nodes, max_emitted, capacity, len(ahead.rows))
                 for row, s in ahead.rows.items()]  # fmt: skip
        full = {c.row for c in candidates if not c.choice.partial and c.buffered == 0}
        remaining = capacity
        for c in sorted(candidates, key=lambda c: c.urgency, reverse=True):
            if c.row in full or (c.choice.partial and not c.is_due):
                continue
            if c.buffered <= remaining:
                full.add(c.row)
                remaining -= c.buffered
            elif not c.choice.partial:
                raise SpecbuildError(
                    f"SpecPV: a full step must feed {c.buffered} tokens again, with capacity for "
                    f"{remaining}; build with a larger --specpv-n-spec-tokens-buf or a smaller "
                    "--max-batch-size"
                )
        choices = {c.row: self._final_choice(c, c.row in full) for c in candidates}
        flags = np.zeros(ahead.batch, np.int32)
        for row, choice in choices.items():
            self._sequences[ahead.rows[row].index].flights.append((choice, max_emitted))
            flags[row] = not choice.partial
        self._write_if_changed(flags)
        # Steps that select views or re-verify tokens have programs of their own.
        chosen = any(choice.blocks is not None for choice in choices.values())
        return ModeRequest(capacity - remaining if chosen or remaining < capacity else None)

    def received(
        self, sequence: SequenceState, mode_request: ModeRequest, result: StepResult, row: int
    ) -> None:
        """Receive the oldest step in flight, and count the tokens that it re-verified."""
        state, emitted = self._sequences[sequence.index], result.count[row]
        if mode_request.reverified is not None:
            state.view.counters.recheck(result.rechecked[row], result.agreed[row])
        choice, _ = state.flights.popleft()
        choice = _at_length(state.view, choice, state.length)
        state.view.log_fallback(choice, sequence.request.id, state.length)
        state.view.committed(choice, state.length, state.length + emitted)
        state.length += emitted

    def _candidate(  # noqa: PLR0917
        self,
        row: int,
        sequence: SequenceState,
        nodes: int,
        max_emitted: int,
        capacity: int,
        batch: int,
    ) -> _Candidate:
        state = self._sequences[sequence.index]
        view, length = state.ahead()
        choice = view.choose(length, nodes)
        state.view.counters.invariant_failures += view.counters.invariant_failures
        config = self._geometry.config
        buffered = length - min(view.global_verified_len, length)
        at_once = max(1, capacity // config.n_spec_tokens_buf)
        lead = -(-batch // at_once) - 1
        is_due = (
            buffered + nodes + 1 + lead * max_emitted > config.n_spec_tokens_buf
            or view.partial_steps >= config.full_refresh_interval - lead
        )
        return _Candidate(row, choice, buffered, is_due and buffered > 0)

    def _final_choice(self, candidate: _Candidate, full: bool) -> StepChoice:
        choice = candidate.choice
        if not full or not choice.partial:
            return choice
        # The sequence is refreshed before its interval ends.
        return StepChoice(False, choice.chain_start - candidate.buffered, None, "refresh interval")

    def _write_if_changed(self, flags: np.ndarray) -> None:
        if self._flags is None or not np.array_equal(flags, self._flags):
            self._executor.write(FULL_STEP, flags)
            self._flags = flags


def _at_length(view: SequenceView, choice: StepChoice, length: int) -> StepChoice:
    """Return the choice for the actual length, as the device computes it."""
    return choice if choice.partial else replace(choice, blocks=view.blocks_at(length))


def _sizes(shape: DraftShape | None) -> tuple[int, int]:
    """Return the nodes of a step's tree below the root, and its maximum of emitted tokens."""
    if shape is None:
        return 0, 1
    return shape.draft_tokens, min(shape.draft_depth, shape.draft_tokens) + 1
