"""The loop over steps that run on the device: the host admits, launches ahead, reads, emits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from specbuild.runtime.cache.pages import KvPools, SequencePages
from specbuild.runtime.decode.device_rows import PENDING, SlotTable
from specbuild.runtime.decode.emission import Emission, TextStreams
from specbuild.runtime.decode.prefill_rows import SlotRows, launched_rows, sampling_rows
from specbuild.runtime.decode.program_table import ProgramTable, needs_full_logits
from specbuild.runtime.decode.scheduler import Chunk, Scheduler
from specbuild.runtime.draft.costs import Outlook
from specbuild.runtime.draft.policy import DraftPolicy, StepOutcome
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.engine_dir.plan import ProgramEntry
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.executor import ResidentExecutor
from specbuild.runtime.lossy.dsa.ahead import ResidentSelections, StepSelections
from specbuild.runtime.lossy.specpv.ahead import ResidentViews
from specbuild.runtime.request import Event, Request, SequenceState

# Steps on the device at once: the next is queued before the last one's tokens are read, so that
# the device never waits for the host.
STEPS_IN_FLIGHT = 2
# A result that was there before this long was waited for: the host came late, and the time between
# two results is not the step's.
_LATE_S = 50e-6


@dataclass(frozen=True)
class _Flight:
    """A step that was started, and the sequences whose slots it found.

    ``warm``: its program had run before in this generation. ``selections``: how its sequences
    attend, where indexers may choose. ``refreshes``: it may feed tokens again.
    """

    number: int
    sequences: tuple[SequenceState, ...]
    outlook: Outlook
    shape: DraftShape | None
    warm: bool
    selections: StepSelections
    refreshes: bool


class ResidentGeneration:
    """One call of ``Engine.generate`` on an executor that keeps the state of its sequences."""

    def __init__(
        self,
        *,
        executor: ResidentExecutor,
        manifest: Manifest,
        kv: KvPools,
        programs: ProgramTable,
        requests: Sequence[Request],
        policy: DraftPolicy,
        max_batch_size: int,
        text_stream: TextStreams,
    ) -> None:
        self._executor = executor
        self._manifest = manifest
        self._programs = programs
        self._policy = policy
        self._groups = tuple(group.name for group in manifest.cache_groups)
        self._slots = SlotTable(executor, self._groups)
        self._views = None if manifest.specpv is None else ResidentViews(executor, manifest)
        self._selections = None if manifest.dsa is None else ResidentSelections(executor, manifest)
        self._flights: deque[_Flight] = deque()
        self._next_step = 0
        self._received_s: float | None = None
        self._warm: set[str] = set()
        pending = executor.port(PENDING[1])
        # Rows that may wait for the draft in a slot, and at most how many do.
        self._room = 0 if pending is None or policy.max_depth == 0 else pending.shape[1]
        # A shape that was chosen ahead, and the batch that it was chosen for.
        self._chosen: tuple[int, DraftShape | None] | None = None
        self._waiting = 0
        self._emission = Emission(
            manifest.target.eos_token_ids,
            max_depth=policy.max_depth,
            text_stream=text_stream,
            finished=self._finished,
        )
        limits = replace(
            manifest.limits, max_batch_size=max_batch_size, max_rows=programs.prefill_rows
        )
        self._scheduler = Scheduler(requests, limits, kv, self._admitted)

    def events(self) -> Iterator[Event]:
        """Runs until every request is done."""
        self._executor.use()
        self._slots.clear(self._manifest.target.eos_token_ids)
        self._next_step = int(self._executor.read("step")[0])
        try:
            while not self._scheduler.finished:
                batch = self._scheduler.schedule()
                if not batch.chunks:
                    self._launch_ahead(batch.sequences)
                # A prompt waits until what was started is read: that may free more slots.
                elif not self._flights:
                    yield from self._prefill(batch.chunks)
                    continue
                yield from self._receive()
        finally:
            self._scheduler.close()

    def _admitted(
        self,
        index: int,
        request: Request,
        pages: dict[str, SequencePages],
        reserved: dict[str, int],
    ) -> SequenceState:
        sequence = self._emission.admit(index, request, pages, reserved)
        self._slots.admit(sequence)
        return sequence

    def _finished(self, sequence: SequenceState) -> None:
        self._scheduler.retire(sequence)
        self._slots.remove(sequence)
        if self._views is not None:
            self._views.release(sequence)
        if self._selections is not None:
            self._selections.release(sequence)

    def _prefill(self, chunks: Sequence[Chunk]) -> list[Event]:
        """One launch of prompt chunks; only where a prompt ends its result is waited for."""
        executor, slots = self._executor, self._slots
        rows = [SlotRows(slots.slot_of(c.sequence), c.sequence, c.start, c.count) for c in chunks]
        ending = [r for r, chunk in zip(rows, chunks, strict=True) if chunk.is_last]
        entry = self._programs.prefill(
            rows=sum(r.count for r in rows),
            batch=1 + max(r.slot for r in rows),
            full_logits=_full_logits([r.sequence for r in ending]),
        )
        arrays = launched_rows(rows, entry, self._groups, drafted=slots.drafted)
        for name, values in (arrays | sampling_rows(ending, entry)).items():
            executor.write(name, values)
        executor.start(entry)
        for chunk in chunks:
            chunk.sequence.length += chunk.count
        self._received_s = None
        if not ending:
            return []
        self._waiting = max(self._waiting, 1)
        if any(s.wanted > 1 for s in slots.sequences):
            # While the device works, what the first step needs is made ready.
            outlook = _outlook(slots.sequences)
            self._chosen = (outlook.batch, self._next_shape(outlook))
            executor.prepare(self._expected_entry(slots.sequences, self._chosen[1]))
        choice = executor.read("prefill.choice")
        logprob = executor.read("prefill.logprob")
        for r in ending:
            slots.begin(r.sequence, int(choice[r.slot]))
            if self._views is not None:
                self._views.begin(r.sequence, r.slot)
            if self._selections is not None:
                self._selections.begin(r.sequence)
            r.sequence.tally.first_token()
        events: list[Event] = []
        for r in ending:
            token = (int(choice[r.slot]), float(logprob[r.slot]))
            events += self._emission.take(r.sequence, [token], accepted=0)
        return events

    def _launch_ahead(self, sequences: Sequence[SequenceState]) -> None:
        """Starts steps while one more can be of use: each in flight gives a token at least."""
        outlook = _outlook(sequences)
        while len(self._flights) < min(STEPS_IN_FLIGHT, outlook.tokens_left):
            shape = self._next_shape(outlook)
            selections = self._next_selections(shape)
            entry = self._next_entry(sequences, shape, selections)
            self._waiting = self._waiting_after(shape)
            self._executor.start(entry)
            warm = entry.name in self._warm
            self._warm.add(entry.name)
            found = tuple(self._slots.sequences)
            self._flights.append(
                _Flight(
                    self._next_step,
                    found,
                    outlook,
                    shape,
                    warm,
                    selections,
                    refreshes=entry.fed_again > 0,
                )
            )
            self._next_step += 1

    def _next_shape(self, outlook: Outlook) -> DraftShape | None:
        """The policy's choice, which counts as a step: one made ahead for this batch is taken."""
        chosen, self._chosen = self._chosen, None
        if chosen is not None and chosen[0] == outlook.batch:
            return chosen[1]
        return self._policy.shape(outlook)

    def _receive(self) -> list[Event]:
        """Reads the oldest step in flight. Sequences that ended before it have no part in it."""
        flight = self._flights.popleft()
        asked_s = perf_counter()
        result = self._executor.wait_step(flight.number, len(flight.sequences))
        step_s = self._step_time(flight, asked_s)
        depth = _depth(flight.shape)
        events: list[Event] = []
        counted: list[int] = []
        depths: list[int] = []
        for b, sequence in enumerate(flight.sequences):
            if sequence.finish_reason is not None:
                continue
            count, accepted = result.count[b], result.accepted[b]
            if not 1 <= count <= min(accepted + 1, len(result.tokens[b]), sequence.wanted):
                raise SpecbuildError(
                    f"step {flight.number} gave request {sequence.request.id!r} {count} tokens of "
                    f"{accepted} accepted drafts with {sequence.wanted} wanted; build the engine "
                    "again"
                )
            if self._views is not None:
                again = (result.rechecked[b], result.agreed[b]) if flight.refreshes else (0, 0)
                self._views.received(sequence, count, rechecked=again[0], agreed=again[1])
            if self._selections is not None:
                self._selections.received(
                    sequence,
                    flight.selections.attends[sequence.index],
                    broken=result.broken[b] if flight.selections.narrows else 0,
                    check=result.checks[b] if flight.selections.checks else (),
                )
            # A draft that could be emitted by no step was not worth verifying: it counts for none.
            counted.append(min(accepted, sequence.wanted - 1))
            # What an end of sequence cut off was not refused.
            depths.append(counted[-1] if count <= accepted else min(depth, sequence.wanted - 1))
            tokens = zip(result.tokens[b][:count], result.logprobs[b][:count], strict=True)
            events += self._emission.take(sequence, list(tokens), accepted=counted[-1])
            sequence.length = sequence.known - 1
        if counted:
            self._policy.observe(StepOutcome(flight.outlook, flight.shape, depths, counted, step_s))
        return events

    def _step_time(self, flight: _Flight, asked_s: float) -> float | None:
        """The time between two results that followed directly, where it is the step's own."""
        now_s, before_s = perf_counter(), self._received_s
        on_time = now_s - asked_s > _LATE_S
        self._received_s = now_s if on_time else None
        # A check takes two passes, which says nothing of what a step costs.
        own = on_time and flight.warm and not flight.selections.checks and before_s is not None
        return now_s - before_s if own and before_s is not None else None

    def _next_selections(self, shape: DraftShape | None) -> StepSelections:
        """How the next step attends; with DSA the device learns what its rows may choose."""
        if self._selections is None:
            return StepSelections()
        ahead = sum(1 + _depth(flight.shape) for flight in self._flights)
        return self._selections.plan(self._slots.sequences, ahead=ahead, depth=_depth(shape))

    def _next_entry(
        self,
        sequences: Sequence[SequenceState],
        shape: DraftShape | None,
        selections: StepSelections,
    ) -> ProgramEntry:
        """The program of the next step; with SpecPV the device learns who takes a full one."""
        if self._views is None:
            return self._step_entry(sequences, shape, selections)
        room = self._programs.refresh_room(shape, batch=len(sequences))
        views = self._views.plan(self._slots.sequences, shape, room)
        return self._step_entry(sequences, shape, selections, fed_again=views.fed_again)

    def _expected_entry(
        self, sequences: Sequence[SequenceState], shape: DraftShape | None
    ) -> ProgramEntry:
        """The program of a first step, before its sequences are known to be there."""
        selections = StepSelections()
        if self._selections is not None:
            selections = self._selections.expected(sequences, depth=_depth(shape))
        return self._step_entry(sequences, shape, selections)

    def _step_entry(
        self,
        sequences: Sequence[SequenceState],
        shape: DraftShape | None,
        selections: StepSelections,
        *,
        fed_again: int | None = None,
    ) -> ProgramEntry:
        return self._programs.step(
            shape,
            batch=len(sequences),
            full_logits=_full_logits(sequences),
            extends=shape is None and self._is_full,
            fed_again=fed_again,
            narrows=selections.narrows,
            checks=selections.checks,
        )

    @property
    def _is_full(self) -> bool:
        """Whether one more row could find no room to wait for the draft in."""
        return 0 < self._room <= self._waiting

    def _waiting_after(self, shape: DraftShape | None) -> int:
        """Most rows that wait for the draft after a step; where they were full it took them up."""
        if shape is not None:
            return shape.draft_depth + 1
        return 1 if self._is_full else self._waiting + 1


def _depth(shape: DraftShape | None) -> int:
    return 0 if shape is None else shape.draft_depth


def _outlook(sequences: Sequence[SequenceState]) -> Outlook:
    return Outlook(
        len(sequences),
        tokens_left=max(s.wanted for s in sequences),
        rows_behind=0,
        context=sum(s.known for s in sequences) // len(sequences),
    )


def _full_logits(sequences: Sequence[SequenceState]) -> bool:
    return needs_full_logits(s.request.params.sampling for s in sequences)
