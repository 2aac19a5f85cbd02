"""Launches of a device that keeps its state: the host queues them ahead, and reads the results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from time import perf_counter

from specbuild.runtime.decode.device.adjusted_rows import AdjustedRows, adjusts
from specbuild.runtime.decode.device.flights import (
    PromptsInFlight,
    StepInFlight,
    StepTimer,
    check_count,
    count_lost,
    likeliest_of,
)
from specbuild.runtime.decode.device.guide_checks import GuideChecks, ReceivedStep
from specbuild.runtime.decode.device.offers import DeviceOffers, offered_ahead, unread_tokens
from specbuild.runtime.decode.device.pages import DevicePages
from specbuild.runtime.decode.device.prefill_rows import PromptRows, launched_rows, sampling_rows
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.decode.device.rows import PENDING, DeviceRows
from specbuild.runtime.decode.scheduler import Chunk
from specbuild.runtime.decode.stepper import LaunchDone, NewTokens
from specbuild.runtime.draft.costs import Outlook
from specbuild.runtime.draft.offer import OfferedDepths
from specbuild.runtime.draft.policy import ChosenDraft, StepOutcome
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.plan import ProgramEntry
from specbuild.runtime.executors.executor import DeviceExecutor
from specbuild.runtime.lossy.dsa.ahead import DeviceSelections
from specbuild.runtime.lossy.mode import DeviceMode, ModePlan, StepAhead, joined
from specbuild.runtime.lossy.specpv.ahead import DeviceViews
from specbuild.runtime.request import SequenceState
from specbuild.runtime.sampling import samples


class DeviceStepper:
    """Runs an engine's programs, which keep the state of their sequences on the device.

    ``drafts``: whether a step may have a draft. ``offers`` proposes chains, which the policy may
    take in the place of one of the device's.
    """

    most_in_flight = 2

    def __init__(
        self,
        executor: DeviceExecutor,
        manifest: Manifest,
        programs: ProgramTable,
        *,
        drafts: bool,
        offers: DeviceOffers | None = None,
    ) -> None:
        self._executor = executor
        self._offers = offers
        self._eos_token_ids = manifest.target.eos_token_ids
        self._programs = programs
        self._groups = tuple(group.name for group in manifest.cache_groups)
        self._rows = DeviceRows(executor, self._groups)
        self._pages = DevicePages(self._rows, manifest)
        self._adjusted = AdjustedRows(executor, manifest.target.eos_token_ids)
        # Behind a masked step a draft wants what that step read.
        drafts_on = drafts and self._rows.drafted
        self._checks = GuideChecks(self._rows, drafted=drafts_on)
        self._can_check = programs.adjusts_and_extends or not drafts_on
        self._floors = executor.port("prefill.floor") is not None
        self._modes: list[DeviceMode] = []
        if manifest.specpv is not None:
            self._modes.append(DeviceViews(executor, manifest, programs))
        if manifest.dsa is not None:
            self._modes.append(DeviceSelections(executor, manifest))
        self._flights: deque[PromptsInFlight | StepInFlight] = deque()
        self._read: list[NewTokens] = []
        self._read_from: StepInFlight | None = None
        self._next_step = 0
        self._timer = StepTimer()
        self._warm: set[str] = set()
        pending = executor.port(PENDING[1])
        # Tokens of a sequence that may wait for the draft, and at most how many do.
        self._capacity = 0 if pending is None or not drafts else pending.shape[1]
        self._waiting = 0

    @property
    def in_flight(self) -> int:
        """Launches queued on the device."""
        return len(self._flights)

    def open(self) -> None:
        """Empties every row."""
        self._executor.use()
        self._rows.clear(self._eos_token_ids)
        self._next_step = int(self._executor.read("step")[0])

    def admit(self, sequence: SequenceState) -> None:
        """Gives a sequence the next row."""
        self._rows.admit(sequence)
        # What the device queued ahead could not be checked before a remote guide's mask arrives.
        is_remote = sequence.guide is not None and sequence.guide.is_remote
        if self._can_check and sequence.request.params.only_guided and not is_remote:
            self._checks.admit(sequence)
        sequence.apart = adjusts(sequence) and sequence not in self._checks

    def release(self, sequence: SequenceState) -> None:
        """Frees a sequence's row, behind the launches in flight."""
        self._rows.remove(sequence)
        self._checks.release(sequence)
        for mode in self._modes:
            mode.release(sequence)
        if self._offers is not None:
            self._offers.release(sequence)

    def grow(self, sequence: SequenceState) -> None:
        """The next step that wants them takes the pages."""

    def pause(self, sequence: SequenceState) -> None:
        """Its row counts as done; its state stays."""
        self._rows.pass_over(sequence, done=True)

    def resume(self, sequence: SequenceState) -> None:
        """Its row is decoded again; as many tokens of it as can be may wait for the draft."""
        self._rows.pass_over(sequence, done=False)
        if sequence.guide is None or not sequence.guide.is_remote:
            self._waiting = max(self._waiting, self._capacity)

    def close(self, sequences: Sequence[SequenceState]) -> None:
        """Rows are emptied when the next loop opens."""
        if self._offers is not None:
            for sequence in sequences:
                self._offers.release(sequence)

    def outlook(self, sequences: Sequence[SequenceState]) -> Outlook:
        """Drafts are taken up in the step: none is behind."""
        unread: Sequence[int] = ()
        reach: tuple[tuple[float, ...], ...] = ()
        if self._offers is not None:
            unread = unread_tokens(sequences, self._steps_ahead)
            rows, full_logits = self._ahead(sequences, None).batch, _full_logits(sequences)
            reach = self._offers.look(sequences, unread, rows=rows, full_logits=full_logits)
        return Outlook(
            len(sequences),
            tokens_left=max(s.wanted for s in sequences),
            rows_behind=0,
            context=sum(s.known for s in sequences) // len(sequences),
            sampled=samples(s.request.params.sampling for s in sequences),
            full_logits=_full_logits(sequences),
            reach=reach,
            ahead=any(unread),
        )

    def start_prompts(self, chunks: Sequence[Chunk]) -> None:
        """Queues one launch of prompt chunks."""
        executor, table = self._executor, self._rows
        for chunk in chunks:
            self._pages.before_prompt(chunk.sequence, chunk.start + chunk.count)
        rows = [PromptRows(table.row_of(c.sequence), c.sequence, c.start, c.count) for c in chunks]
        ending = [r for r, chunk in zip(rows, chunks, strict=True) if chunk.is_last]
        entry = self._programs.prefill(
            rows=sum(r.count for r in rows),
            batch=1 + max(r.row for r in rows),
            full_logits=_full_logits([r.sequence for r in ending]),
        )
        arrays = launched_rows(rows, entry, self._groups, drafted=table.drafted)
        arrays |= sampling_rows(ending, entry, floors=self._floors)
        for name, values in arrays.items():
            executor.write(name, values)
        executor.start(entry)
        adjusted = [r for r in ending if adjusts(r.sequence)]
        top = self._adjusted.choose_first(adjusted, self._programs) if adjusted else None
        for chunk in chunks:
            chunk.sequence.length += chunk.count
            self._pages.behind_prompt(chunk.sequence)
        for r in ending:
            table.prompt_ends(r.row)
        token, logprob = (executor.fetch(f"prefill.{name}") for name in ("choice", "logprob"))
        read = sum(chunk.count for chunk in chunks)
        self._flights.append(PromptsInFlight(read, tuple(ending), token, logprob, top))

    def prepare_step(self, sequences: Sequence[SequenceState], shape: ChosenDraft) -> None:
        """Loads the program of a first step, before its sequences are known to go on."""
        ahead = self._ahead(sequences, shape)
        plans = tuple(mode.expected(ahead) for mode in self._modes)
        self._executor.prepare(self._step_entry(ahead, joined(plans)))

    def start(
        self, sequences: Sequence[SequenceState], shape: ChosenDraft, outlook: Outlook
    ) -> None:
        """Queues a step, which passes over the rows of other sequences."""
        ahead = self._ahead(sequences, shape)
        apart = sequences[0].apart
        plans = () if apart else tuple(mode.plan(ahead) for mode in self._modes)
        if apart:
            entry = self._adjusted_entry(ahead)
        else:
            entry = self._step_entry(ahead, joined(plans))
            self._waiting = self._waiting_after(ahead, entry)
        most = max((1 + step.depth for step in self._steps_ahead), default=0)
        for sequence in sequences:
            self._pages.before_step(sequence, sequence.steps_ahead * most)
        if ahead.offered is not None:
            assert self._offers is not None
            self._offers.write(entry, ahead.rows, ahead.offered)
        self._executor.start(entry, self._next_step)
        warm = entry.name in self._warm
        self._warm.add(entry.name)
        for sequence in sequences:
            sequence.steps_ahead += 1
        top = self._adjusted.fetch_top(sequences) if apart else None
        if apart:
            self._checks.behind_masked_step(sequences)
        step = StepInFlight(
            number=self._next_step,
            ahead=ahead,
            chosen=shape,
            outlook=outlook,
            extends=entry.extends or entry.draft_depth > 0,
            warm=warm,
            plans=plans,
            waiting=None if apart else self._waiting,
            top=top,
            waited=not self._flights,
        )
        self._flights.append(step)
        self._next_step += 1

    def _adjusted_entry(self, ahead: StepAhead) -> ProgramEntry:
        """The next step's masks are written."""
        extends = self._checks.drafted and any(s in self._checks for s in ahead.rows.values())
        for row, sequence in ahead.rows.items():
            if sequence.guide is not None:
                self._adjusted.mask(sequence, row)
            if extends and sequence not in self._checks:
                # The draft does not know what stands before: nothing waits for it.
                self._executor.fill(PENDING[0], 0, row=row)
        return self._programs.adjusted_step(ahead.batch, extends=extends)

    def receive(self) -> LaunchDone:
        """Reads the oldest launch in flight."""
        flight = self._flights.popleft()
        return (
            self._receive_step(flight) if isinstance(flight, StepInFlight) else self._begin(flight)
        )

    def _begin(self, flight: PromptsInFlight) -> LaunchDone:
        """Steps from now on decode the sequences whose prompts ended."""
        token, logprob = flight.token(), flight.logprob()
        self._timer.reset()
        first = []
        for r in flight.ending:
            if r.sequence.released:
                continue
            row = self._rows.begin(r.sequence, int(token[r.row]))
            for mode in self._modes:
                mode.begin(r.sequence, row)
            tokens = [(int(token[r.row]), float(logprob[r.row]))]
            likeliest = likeliest_of(flight.top, r.sequence, r.row)
            first.append(NewTokens(r.sequence, tokens, top_logprobs=likeliest))
            self._waiting = max(self._waiting, 1)
        return LaunchDone(first, prompt_tokens=flight.tokens)

    def _receive_step(self, flight: StepInFlight) -> LaunchDone:
        ahead, asked_s = flight.ahead, perf_counter()
        result = self._executor.wait_step(flight.number, ahead.batch)
        step_s = self._timer.step_time(flight, asked_s)
        self._read_from = flight
        depths: list[int] = []
        offered: list[tuple[SequenceState, int, int]] = []
        for row, sequence in ahead.rows.items():
            sequence.steps_ahead -= 1
            if sequence.released:
                continue
            proposed = ahead.proposed(row, sequence.wanted - 1)
            if sequence.stale:
                sequence.stale -= 1
                count_lost(sequence, proposed)
                continue
            count, accepted = result.count[row], result.accepted[row]
            check_count(flight, result, row)
            for mode, plan in zip(self._modes, flight.plans, strict=True):
                mode.received(sequence, plan, result, row)
            kept = self._kept(flight, sequence, result.tokens[row][:count])
            allowed = kept if sequence in self._checks else 0
            if not kept and sequence.guide is not None and sequence.guide.failure is None:
                count_lost(sequence, proposed)
                continue
            # A draft that could be emitted by no step was not worth verifying: it counts for none.
            counted = min(accepted, sequence.wanted - 1, kept)
            # What an end of sequence cut off was not refused, nor what a guide did.
            cut = min(count, kept + 1) <= accepted
            depth = min(ahead.depth_of(row), sequence.wanted - 1)
            depths.append(counted if cut else depth)
            offered.append((sequence, proposed, counted))
            tokens = zip(result.tokens[row][:kept], result.logprobs[row][:kept], strict=True)
            likeliest = likeliest_of(flight.top, sequence, row)
            new = NewTokens(sequence, list(tokens), counted, likeliest, proposed, allowed)
            self._read.append(new)
        if not self._read or flight.waiting is None:
            return LaunchDone(self._read)
        if ahead.offered is not None and self._offers is not None:
            self._offers.taken(offered)
        accepted_drafts = [new.accepted for new in self._read]
        outcome = StepOutcome(flight.outlook, flight.chosen, depths, accepted_drafts, step_s)
        return LaunchDone(self._read, outcome)

    def _kept(self, flight: StepInFlight, sequence: SequenceState, tokens: Sequence[int]) -> int:
        """How many of a step's tokens stand: all where no guide checks them."""
        masked = flight.waiting is None
        if masked and sequence.guide is not None and not sequence.to_repeat:
            sequence.counters.mask(len(tokens))
        if sequence not in self._checks:
            return len(tokens)
        steps = (step for step in self._flights if isinstance(step, StepInFlight) and step.extends)
        behind = any(sequence in step.ahead.rows.values() for step in steps)
        return self._checks.received(sequence, ReceivedStep(tokens, masked, flight.extends, behind))

    def settle(self) -> None:
        """The tokens that were emitted stand in the cache, all but the newest."""
        for new in self._read:
            sequence, flight = new.sequence, self._read_from
            assert flight is not None
            waiting = flight.waiting
            sequence.length = sequence.known - 1
            if waiting is None and flight.extends and sequence in self._checks:
                waiting = 1
            elif waiting is None:
                # All behind the prompt's last token but one, with which reading it ended.
                waiting = sequence.length - len(sequence.request.prompt_ids) + 1
            self._pages.behind_step(sequence, waiting)
        self._read = []

    def _ahead(self, sequences: Sequence[SequenceState], chosen: ChosenDraft) -> StepAhead:
        """The next step as it is known before those in flight are through."""
        taking = {sequence.index for sequence in sequences}
        rows = {r: s for r, s in enumerate(self._rows.sequences) if s.index in taking}
        emitted = sum(1 + step.depth for step in self._steps_ahead)
        if isinstance(chosen, OfferedDepths):
            return offered_ahead(rows, sequences, chosen, emitted)
        return StepAhead(rows, chosen, most_emitted=emitted)

    @property
    def _steps_ahead(self) -> list[StepAhead]:
        """The steps in flight."""
        return [flight.ahead for flight in self._flights if isinstance(flight, StepInFlight)]

    def _step_entry(self, ahead: StepAhead, plan: ModePlan) -> ProgramEntry:
        full_logits = _full_logits(ahead.rows.values())
        if ahead.offered is not None:
            return self._programs.offered_step(
                ahead.depth, batch=ahead.batch, full_logits=full_logits
            )
        return self._programs.step(
            ahead.shape,
            batch=ahead.batch,
            full_logits=full_logits,
            extends=ahead.shape is None and self._is_full,
            reverified=plan.reverified,
            sparse=plan.sparse,
            checks=plan.checks,
        )

    @property
    def _is_full(self) -> bool:
        """Whether one more token could find no place to wait for the draft in."""
        return 0 < self._capacity <= self._waiting

    def _waiting_after(self, ahead: StepAhead, entry: ProgramEntry) -> int:
        """Most tokens that wait for the draft after a step; where it extends it took them."""
        if ahead.offered is not None:
            # It takes up all of a chain but the newest.
            return min(1 + ahead.depth, self._capacity)
        if ahead.shape is not None:
            return ahead.depth + 1
        return 1 if entry.extends or self._is_full else self._waiting + 1


def _full_logits(sequences: Iterable[SequenceState]) -> bool:
    return any(s.request.params.needs_full_logits for s in sequences)
