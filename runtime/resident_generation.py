"""The loop over steps that run on the device: the host admits, launches ahead, reads, emits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from specbuild.runtime.draft_tree import chain_trees
from specbuild.runtime.emission import Emission, TextStreams
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executor import ResidentExecutor
from specbuild.runtime.kv_pool import KvPools, SequencePages
from specbuild.runtime.manifest import DraftShape, Manifest
from specbuild.runtime.plan import ProgramEntry
from specbuild.runtime.policy import DraftPolicy, Outlook
from specbuild.runtime.program_table import ProgramTable, needs_full_logits
from specbuild.runtime.prompt_rows import SlotRows, launched_rows, sampling_rows
from specbuild.runtime.request import Event, Request, SequenceState
from specbuild.runtime.resident_views import ResidentViews
from specbuild.runtime.scheduler import Chunk, Scheduler
from specbuild.runtime.slots import SlotTable

# Steps on the device at once: the next is queued before the last one's tokens are read, so that
# the device never waits for the host.
STEPS_IN_FLIGHT = 2


@dataclass(frozen=True)
class _Flight:
    """A step that was started, and the sequences whose slots it found."""

    number: int
    sequences: tuple[SequenceState, ...]
    shape: DraftShape | None


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
        self._flights: deque[_Flight] = deque()
        self._next_step = 0
        self._received_s: float | None = None
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
        if any(s.wanted > 1 for s in slots.sequences):
            # While the device works, what the first step needs is made ready.
            executor.prepare(self._step_entry(slots.sequences, self._shape(slots.sequences)))
        choice = executor.read("prefill.choice")
        logprob = executor.read("prefill.logprob")
        for r in ending:
            slots.begin(r.sequence, int(choice[r.slot]))
            if self._views is not None:
                self._views.begin(r.sequence, r.slot)
            r.sequence.tally.first_token()
        events: list[Event] = []
        for r in ending:
            token = (int(choice[r.slot]), float(logprob[r.slot]))
            events += self._emission.take(r.sequence, [token], accepted=0)
        return events

    def _launch_ahead(self, sequences: Sequence[SequenceState]) -> None:
        """Starts steps while one more can be of use: each in flight gives a token at least."""
        wanted = max(s.wanted for s in sequences)
        while len(self._flights) < min(STEPS_IN_FLIGHT, wanted):
            shape = self._shape(sequences)
            self._executor.start(self._next_entry(sequences, shape))
            self._flights.append(_Flight(self._next_step, tuple(self._slots.sequences), shape))
            self._next_step += 1

    def _receive(self) -> list[Event]:
        """Reads the oldest step in flight. Sequences that ended before it have no part in it."""
        flight = self._flights.popleft()
        result = self._executor.wait_step(flight.number, len(flight.sequences))
        events: list[Event] = []
        counted: list[int] = []
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
                self._views.received(sequence, count)
            # A draft that could be emitted by no step was not worth verifying: it counts for none.
            counted.append(min(accepted, sequence.wanted - 1))
            tokens = zip(result.tokens[b][:count], result.logprobs[b][:count], strict=True)
            events += self._emission.take(sequence, list(tokens), accepted=counted[-1])
            sequence.length = sequence.known - 1
        self._observe(flight, counted)
        return events

    def _observe(self, flight: _Flight, accepted: list[int]) -> None:
        """Tells the policy; a step's time is that between two results that followed directly."""
        now_s = perf_counter()
        step_s = None if self._received_s is None else now_s - self._received_s
        self._received_s = now_s
        if accepted:
            depth = 0 if flight.shape is None else flight.shape.draft_depth
            drafts = np.zeros((len(accepted), depth), np.int32)
            self._policy.observe(chain_trees([0] * len(accepted), drafts), accepted, step_s)

    def _shape(self, sequences: Sequence[SequenceState]) -> DraftShape | None:
        wanted = max(s.wanted for s in sequences)
        return self._policy.shape(Outlook(len(sequences), tokens_left=wanted, rows_behind=0))

    def _next_entry(
        self, sequences: Sequence[SequenceState], shape: DraftShape | None
    ) -> ProgramEntry:
        """The program of the next step; with SpecPV the device learns who takes a full one."""
        entry = self._step_entry(sequences, shape)
        if self._views is None:
            return entry
        full_logits = _full_logits(sequences)
        refresh = self._programs.step(
            shape, batch=len(sequences), full_logits=full_logits, refresh=True
        )
        views = self._views.plan(self._slots.sequences, shape, refresh.fed_again)
        return refresh if views.refresh else entry

    def _step_entry(
        self, sequences: Sequence[SequenceState], shape: DraftShape | None
    ) -> ProgramEntry:
        full_logits = _full_logits(sequences)
        return self._programs.step(shape, batch=len(sequences), full_logits=full_logits)


def _full_logits(sequences: Sequence[SequenceState]) -> bool:
    return needs_full_logits(s.request.params.sampling for s in sequences)
