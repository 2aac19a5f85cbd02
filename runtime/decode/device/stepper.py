"""A stepper that queues launches on a device ahead of time and reads their results later."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter

from specbuild.runtime.cache.state_snapshots import StateSnapshots
from specbuild.runtime.decode.device.deferred_fills import DeferredFills
from specbuild.runtime.decode.device.flights import (
    PromptsInFlight,
    StepInFlight,
    StepTimer,
    check_token_count,
    context_of,
    count_discarded,
    only_token,
    outcome_of,
    top_logprobs_of,
)
from specbuild.runtime.decode.device.guide_checks import GuideChecks, KeptTokens, ReceivedStep
from specbuild.runtime.decode.device.pages import DevicePages
from specbuild.runtime.decode.device.prefill_rows import PromptRows, prefill_arrays, sampling_arrays
from specbuild.runtime.decode.device.processor_rows import (
    LogitProcessorRows,
    needs_full_logits,
    uses_processor_steps,
)
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.decode.device.proposals import DeviceProposals, step_ahead
from specbuild.runtime.decode.device.rows import PENDING, DeviceRows
from specbuild.runtime.decode.scheduler import Chunk
from specbuild.runtime.decode.stepper import LaunchResult, NewTokens
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.policy import ChosenDraft
from specbuild.runtime.draft.static_tree import PlacedTree
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.plan import ROW_COUNTS, ProgramEntry
from specbuild.runtime.executors.executor import DeviceExecutor
from specbuild.runtime.lossy.dsa.ahead import DeviceSelections
from specbuild.runtime.lossy.mode import DeviceMode, ModeRequest, StepAhead, joined
from specbuild.runtime.lossy.specpv.ahead import DeviceViews
from specbuild.runtime.request import SequenceState


class DeviceStepper:
    """Runs an engine's programs, which keep the state of their sequences on the device.

    ``drafts``: steps may have a draft, or one of ``proposals``. ``tree``: the form of drafts.
    """

    max_in_flight = 2
    tree: PlacedTree | None = None

    def __init__(
        self,
        executor: DeviceExecutor,
        manifest: Manifest,
        programs: ProgramTable,
        *,
        drafts: bool,
        proposals: DeviceProposals | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self._executor = executor = DeferredFills(executor)
        self._proposals, self._programs = proposals, programs
        self._eos_token_ids = manifest.target.eos_token_ids
        self._groups = tuple(group.name for group in manifest.cache_groups)
        self._rows = DeviceRows(executor, self._groups)
        self._pages = DevicePages(self._rows, manifest, snapshots)
        self._processors = LogitProcessorRows(executor, manifest.target.eos_token_ids)
        # Ordinary steps apply logit processors, and mask the roots of sequences.
        self._shares_steps = manifest.drafted_logit_processors
        self._checks = GuideChecks(
            self._rows,
            self._processors,
            # With a draft model, the draft ingests the tokens of masked steps too.
            has_draft=drafts and self._rows.has_draft,
            shares_steps=self._shares_steps,
            extends=programs.processor_steps_extend,
        )
        self._floors = executor.port("prefill.floor") is not None
        self._modes: list[DeviceMode] = []
        if manifest.specpv is not None:
            self._modes.append(DeviceViews(executor, manifest, programs))
        if manifest.dsa is not None:
            self._modes.append(DeviceSelections(executor, manifest))
        self._flights: deque[PromptsInFlight | StepInFlight] = deque()
        self._new_tokens: list[NewTokens] = []
        self._received_step: StepInFlight | None = None
        self._next_step = 0
        self._timer, self._warm = StepTimer(), set[str]()
        # Capacity of the draft's buffer of pending tokens, and an upper bound of the tokens in it.
        self._max_pending = self._rows.max_pending if drafts else 0
        self._pending = 0

    @property
    def in_flight(self) -> int:
        """Number of launches queued on the device."""
        return len(self._flights)

    def open(self) -> None:
        """Clear every row."""
        self._executor.use()
        self._rows.clear(self._eos_token_ids, self.tree)
        self._next_step = int(self._executor.read("step")[0])

    def admit(self, sequence: SequenceState) -> None:
        """Give a sequence the next row."""
        self._pages.admit(sequence)
        self._checks.admit(sequence)
        needs_masks = sequence.request.params.is_guided or not self._shares_steps
        is_separate = needs_masks and sequence not in self._checks
        sequence.uses_logit_processor = is_separate and uses_processor_steps(sequence)

    def release(self, sequence: SequenceState) -> None:
        """Free a sequence's row after the launches in flight."""
        self._rows.remove(sequence)
        self._checks.release(sequence)
        for mode in self._modes:
            mode.release(sequence)
        if self._proposals is not None:
            self._proposals.release(sequence)

    def grow(self, sequence: SequenceState) -> None:
        """Do nothing: the next step allocates the pages."""

    def pause(self, sequence: SequenceState) -> None:
        """Exclude the row from steps; its state is kept."""
        self._rows.set_done(sequence, done=True)

    def resume(self, sequence: SequenceState) -> None:
        """Include the row in steps again; its pending tokens may fill the draft's buffer."""
        self._rows.set_done(sequence, done=False)
        if sequence.guide is None or not sequence.guide.is_remote:
            self._pending = max(self._pending, self._max_pending)

    def close(self, sequences: Sequence[SequenceState]) -> None:
        """Release the proposals; the next loop clears the rows."""
        if self._proposals is not None:
            for sequence in sequences:
                self._proposals.release(sequence)

    def step_context(self, sequences: Sequence[SequenceState]) -> StepContext:
        """Describe the next step. The draft ingests pending tokens within a step."""
        has_gaps = len(sequences) < len(self._rows.sequences)
        context = context_of(sequences, self._ahead(sequences, None).batch if has_gaps else 0)
        if self._proposals is None:
            return context
        return self._proposals.propose(context, sequences, self._steps_in_flight, self._checks)

    def start_prompts(self, chunks: Sequence[Chunk]) -> None:
        """Queue a prefill launch."""
        executor, table = self._executor, self._rows
        for chunk in chunks:
            self._pages.before_prefill(chunk.sequence, chunk.start + chunk.count)
        rows = [PromptRows(table.row_of(c.sequence), c.sequence, c.start, c.count) for c in chunks]
        finishing = [r for r, chunk in zip(rows, chunks, strict=True) if chunk.is_last]
        entry = self._programs.prefill(
            rows=sum(r.count for r in rows),
            batch=1 + max(r.row for r in rows),
            full_logits=needs_full_logits([r.sequence for r in finishing]),
        )
        arrays = prefill_arrays(rows, entry, self._groups, has_draft=table.has_draft)
        arrays |= sampling_arrays(finishing, entry, floors=self._floors)
        for name, values in arrays.items():
            executor.write(name, values)
        executor.start(entry)
        processed = [r for r in finishing if uses_processor_steps(r.sequence)]
        top_logprobs = (
            self._processors.choose_first_tokens(processed, self._programs) if processed else None
        )
        for chunk in chunks:
            chunk.sequence.length += chunk.count
            self._pages.after_prefill(chunk.sequence)
        for r in finishing:
            table.save_last_aux_hidden(r.row)
        token, logprob = (executor.fetch(f"prefill.{name}") for name in ("choice", "logprob"))
        total = sum(chunk.count for chunk in chunks)
        self._flights.append(PromptsInFlight(total, tuple(finishing), token, logprob, top_logprobs))

    def prepare_step(self, sequences: Sequence[SequenceState], shape: ChosenDraft) -> None:
        """Load the program of the first step after a prefill launch."""
        ahead = self._ahead(sequences, shape)
        mode_requests = tuple(mode.expected(ahead) for mode in self._modes)
        self._executor.prepare(self._step_entry(ahead, joined(mode_requests)))

    def start(
        self, sequences: Sequence[SequenceState], shape: ChosenDraft, step_context: StepContext
    ) -> None:
        """Queue a step. It skips the rows of other sequences."""
        ahead = self._ahead(sequences, shape)
        uses_processor = sequences[0].uses_logit_processor
        mode_requests: tuple[ModeRequest, ...] = ()
        if uses_processor:
            entry = self._processor_entry(ahead)
        else:
            mode_requests = tuple(mode.request_step(ahead) for mode in self._modes)
            entry = self._step_entry(ahead, joined(mode_requests))
            self._pending = self._pending_after(ahead, entry)
        max_unread = max((1 + step.depth for step in self._steps_in_flight), default=0)
        self._pages.before_step(sequences, max_unread)
        chains = None
        if ahead.proposal_lengths is not None and self._proposals is not None:
            chains = self._proposals.write(entry, ahead.rows, ahead.proposal_lengths)
        if ahead.row_depths is not None:
            self._executor.write(ROW_COUNTS, ahead.row_counts(entry.batch))
        if uses_processor:
            num_masked = dict.fromkeys(ahead.rows, 1)
        else:
            num_masked = self._checks.before_step(ahead.rows, chains, self._ingests)
        self._executor.start(entry, self._next_step)
        self._checks.after_step(ahead.rows[row] for row in num_masked)
        is_warm = entry.name in self._warm
        self._warm.add(entry.name)
        for sequence in sequences:
            sequence.steps_in_flight += 1
        step = StepInFlight(
            number=self._next_step,
            ahead=ahead,
            chosen=shape,
            step_context=step_context,
            extends=entry.extends or entry.draft_depth > 0,
            is_warm=is_warm,
            mode_requests=mode_requests,
            pending=None if uses_processor else self._pending,
            num_masked=num_masked,
            top_logprobs=self._processors.fetch_top_logprobs(sequences, entry),
            device_was_idle=not self._flights,
        )
        self._flights.append(step)
        self._next_step += 1

    def _processor_entry(self, ahead: StepAhead) -> ProgramEntry:
        """Write the masks of a logit-processor step; return its program."""
        extends = self._checks.has_draft and any(s in self._checks for s in ahead.rows.values())
        for row, sequence in ahead.rows.items():
            if sequence.guide is not None:
                self._processors.write_mask(sequence, row)
            if extends and sequence not in self._checks:
                # The draft's cache lacks earlier tokens of the sequence, so it ingests nothing.
                self._executor.fill(PENDING[0], 0, row=row)
        return self._programs.processor_step(ahead.batch, extends=extends)

    def receive(self) -> LaunchResult:
        """Read the oldest launch in flight."""
        flight = self._flights.popleft()
        if isinstance(flight, StepInFlight):
            return self._receive_step(flight)
        return self._receive_prompts(flight)

    def _receive_prompts(self, flight: PromptsInFlight) -> LaunchResult:
        """Read a prefill launch and start to decode the sequences whose prompts ended."""
        token, logprob = flight.token(), flight.logprob()
        self._timer.reset()
        first = []
        for r in flight.finishing:
            if r.sequence.released:
                continue
            row = self._rows.begin(r.sequence, int(token[r.row]))
            for mode in self._modes:
                mode.begin(r.sequence, row)
            tokens = [(int(token[r.row]), float(logprob[r.row]))]
            token_logprobs = top_logprobs_of(flight.top_logprobs, r.sequence, r.row, 1)
            first.append(NewTokens(r.sequence, tokens, top_logprobs=token_logprobs))
            self._pending = max(self._pending, 1)
        return LaunchResult(first, prompt_tokens=flight.tokens)

    def _receive_step(self, flight: StepInFlight) -> LaunchResult:
        ahead, wait_started_s = flight.ahead, perf_counter()
        result = self._executor.wait_step(flight.number, ahead.batch)
        step_s = self._timer.step_time(flight, wait_started_s)
        self._received_step = flight
        depths: list[int] = []
        verified: list[tuple[SequenceState, int, int]] = []
        is_plain = ahead.shape is None and not (
            self._modes or self._checks or flight.num_masked or flight.top_logprobs
        )
        for row, sequence in ahead.rows.items():
            sequence.steps_in_flight -= 1
            if sequence.released:
                continue
            if is_plain and (plain := only_token(sequence, result, row)) is not None:
                self._new_tokens.append(plain)
                depths.append(0)
                continue
            proposed = ahead.proposed(row, sequence.tokens_left - 1)
            if sequence.discarded_steps:
                sequence.discarded_steps -= 1
                count_discarded(sequence, proposed)
                continue
            count, accepted = result.count[row], result.accepted[row]
            check_token_count(flight, result, row)
            for mode, mode_request in zip(self._modes, flight.mode_requests, strict=True):
                mode.received(sequence, mode_request, result, row)
            kept, completes = self._kept(flight, sequence, row, result.tokens[row][:count])
            if not kept and sequence.guide is not None and sequence.guide.failure is None:
                count_discarded(sequence, proposed)
                continue
            # Draft tokens beyond the token budget cannot be emitted, so they do not count.
            num_accepted = min(accepted, sequence.tokens_left - 1, kept)
            # Tokens cut off by an end of sequence or by a guide were not refused by the target. A
            # mask refuses tokens whatever the draft predicts.
            cut = min(count, kept + 1) <= accepted or row in flight.num_masked
            depth = min(ahead.depth_of(row), sequence.tokens_left - 1)
            depths.append(num_accepted if cut else depth)
            verified.append((sequence, proposed, num_accepted))
            new = NewTokens(
                sequence,
                [*zip(result.tokens[row][:kept], result.logprobs[row][:kept], strict=True)],
                accepted=num_accepted,
                top_logprobs=top_logprobs_of(flight.top_logprobs, sequence, row, kept),
                proposed=proposed,
                allowed=kept if sequence in self._checks else 0,
                completes=completes,
            )
            self._new_tokens.append(new)
        if not self._new_tokens or flight.pending is None:
            return LaunchResult(self._new_tokens)
        if ahead.proposal_lengths is not None and self._proposals is not None:
            self._proposals.record(verified)
        return LaunchResult(self._new_tokens, outcome_of(flight, self._new_tokens, depths, step_s))

    def _kept(
        self, flight: StepInFlight, sequence: SequenceState, row: int, tokens: Sequence[int]
    ) -> KeptTokens:
        """Return how many tokens of a step are kept: all of them without a guide."""
        num_masked = flight.num_masked.get(row, 0)
        is_counted = num_masked and flight.ahead.proposal_lengths is None
        if is_counted and sequence.guide is not None and not sequence.replay_remaining:
            sequence.counters.mask(1)
        if sequence not in self._checks:
            return KeptTokens(len(tokens))
        step = ReceivedStep(tokens, num_masked, flight.extends, self._ingests(sequence))
        kept = self._checks.received(sequence, step)
        if sequence.needs_mask:
            # After a rollback the draft may lack more tokens than the steps in flight leave.
            self._pending = max(self._pending, self._checks.pending_of(sequence))
        return kept

    def _ingests(self, sequence: SequenceState) -> bool:
        """Return whether the draft ingests the pending tokens of a sequence in a step in flight."""
        flights = self._flights if self._checks.has_draft else ()
        steps = (step for step in flights if isinstance(step, StepInFlight) and step.extends)
        return any(sequence in step.ahead.rows.values() for step in steps)

    def after_emit(self) -> None:
        """Update lengths and pages after the tokens were emitted; the newest is not cached yet."""
        for new in self._new_tokens:
            sequence, flight = new.sequence, self._received_step
            assert flight is not None
            pending = flight.pending
            sequence.length = sequence.num_tokens - 1
            if pending is None and flight.extends and sequence in self._checks:
                pending = 1
            elif pending is None:
                # The draft has ingested the prompt except its last token.
                pending = sequence.length - sequence.prompt_tokens + 1
            self._pages.after_step(sequence, pending)
        self._new_tokens = []

    def _ahead(self, sequences: Sequence[SequenceState], chosen: ChosenDraft) -> StepAhead:
        """Describe the next step before those in flight are received."""
        rows = dict(enumerate(self._rows.sequences))
        if len(sequences) < len(rows):
            indices = {sequence.index for sequence in sequences}
            rows = {r: s for r, s in rows.items() if s.index in indices}
        return step_ahead(rows, sequences, chosen, sum(1 + s.depth for s in self._steps_in_flight))

    @property
    def _steps_in_flight(self) -> list[StepAhead]:
        """The steps in flight."""
        return [flight.ahead for flight in self._flights if isinstance(flight, StepInFlight)]

    def _step_entry(self, ahead: StepAhead, mode_request: ModeRequest) -> ProgramEntry:
        full = needs_full_logits(ahead.rows.values())
        if ahead.proposal_lengths is not None:
            full |= any(sequence in self._checks for sequence in ahead.rows.values())
            lengths, batch = ahead.proposal_lengths.values(), ahead.batch
            return self._programs.host_chain_step(lengths, batch=batch, full_logits=full)
        return self._programs.step(
            ahead.shape,
            batch=ahead.batch,
            full_logits=full,
            extends=ahead.shape is None and 0 < self._max_pending <= self._pending,
            reverified=mode_request.reverified,
            sparse=mode_request.sparse,
            checks=mode_request.checks,
        )

    def _pending_after(self, ahead: StepAhead, entry: ProgramEntry) -> int:
        """Return the maximum number of tokens that the draft has yet to ingest after a step."""
        if ahead.proposal_lengths is not None:
            # The step ingests all tokens of a chain but the newest.
            return min(1 + ahead.depth, self._max_pending)
        if ahead.shape is not None:
            return ahead.depth + 1
        is_full = 0 < self._max_pending <= self._pending
        return 1 if entry.extends or is_full else self._pending + 1
