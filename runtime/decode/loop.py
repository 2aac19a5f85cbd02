"""The decoding loop: schedule → prefill | draft → verify → accept → commit → emit.

In each turn the loop starts launches until the stepper accepts no more, then receives the oldest
launch. The scheduler selects prefill or a decoding step. A new request waits only for the launches
in flight.

Acceptance. In one pass the target computes the root, which is the newest token, and a tree of draft
tokens below it. At every node i it samples the token that it would emit there. ``sample(i)`` is the
argmax, or a draw whose noise depends on (seed, position) only. A node is accepted if its parent is
accepted and the target sampled the node's token at the parent:

    accepted(root) = true,    accepted(i) = accepted(parent(i)) ∧ sample(parent(i)) = token(i)

Siblings have different tokens, so the accepted nodes form one path. The step emits the path's
tokens and the sample at its end, the bonus token. Each of them is the token that decoding without a
draft chooses at its position. So speculation changes how many tokens a step emits, never which.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from specbuild.runtime.cache.sequence_pages import SequencePages
from specbuild.runtime.decode.emission import Emission, finish_unstarted
from specbuild.runtime.decode.request_queue import QueuedRequest
from specbuild.runtime.decode.scheduler import Scheduler
from specbuild.runtime.decode.stepper import NewTokens, Stepper
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.host_proposal import WAIT_FOR_TOKENS, ProposedDepths, WaitForTokens
from specbuild.runtime.draft.policy import ChosenDraft, DraftPolicy
from specbuild.runtime.records import FinishReason
from specbuild.runtime.request import Event, FinishEvent, Request, SequenceState, TokenEvent

# How long the loop waits for a mask if it has no other work. A new request waits as long.
_MASK_WAIT_S = 0.005


class Loop:
    """Serves requests that join and leave between turns.

    Events identify a request by the number that :meth:`add` returned. Call :meth:`close` at the
    end, even after an exception. ``observe`` is called with the number of tokens of each received
    launch: prefilled prompt tokens plus emitted tokens.
    """

    def __init__(
        self,
        stepper: Stepper,
        scheduler: Scheduler,
        emission: Emission,
        policy: DraftPolicy,
        observe: Callable[[int], None] | None = None,
    ) -> None:
        self._stepper = stepper
        self._scheduler = scheduler
        self._emission = emission
        self._policy = policy
        self._observe = observe
        # A shape chosen ahead of its step, with the step context that it was chosen for.
        self._chosen: tuple[StepContext, ChosenDraft] | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running."""
        return self._scheduler.finished

    def add(self, request: Request) -> int:
        """Queue a request; return its number."""
        return self._scheduler.add(request)

    def abort(self, index: int, reason: FinishReason = "abort") -> FinishEvent | None:
        """Finish a request now, with its tokens so far. Return None if it has already finished."""
        queued = self._scheduler.withdraw(index)
        if queued is not None and queued.preempted is None:
            return finish_unstarted(index, queued.request, self._emission.text_stream, reason)
        sequence = self._scheduler.running_sequence(index) if queued is None else queued.preempted
        if sequence is None:
            return None
        sequence.finish_reason = reason
        if queued is None:
            self._release(sequence)
        elif sequence.guide is not None:
            sequence.guide.close()
        return FinishEvent(index, sequence.record())

    def open(self) -> None:
        """Prepare the stepper for this loop. Called once, before the first turn."""
        self._stepper.open()

    def run(self) -> Generator[Event, None, None]:
        """Run all requests to their end, after :meth:`open`, and iterate over their events."""
        self.open()
        try:
            while not self.idle:
                yield from self.turn()
        finally:
            self.close()

    def turn(self) -> list[Event]:
        """Start launches, receive one and return its events. RequestError if none can start.

        Expired requests finish first.
        """
        ends: list[Event] = [
            end
            for index in self._scheduler.expired()
            if (end := self.abort(index, "deadline")) is not None
        ]
        ends += self._collect_masks()
        if self.idle:
            return ends
        self._scheduler.admit(self._admit)
        self._start_launches()
        if not self._stepper.in_flight and self._await_mask():
            return ends
        launch = self._stepper.receive()
        if launch.outcome is not None:
            self._policy.observe(launch.outcome)
        events = self._emit(launch.new_tokens)
        if self._observe is not None:
            num_new_tokens = sum([isinstance(event, TokenEvent) for event in events])
            self._observe(launch.prompt_tokens + num_new_tokens)
        return ends + events

    def close(self) -> None:
        """Release the pages of unfinished requests."""
        self._stepper.close(self._scheduler.close())

    def _start_launches(self) -> None:
        """Start prefill launches and steps, alternating, while the stepper accepts more."""
        prompts_end = False
        while self._stepper.in_flight < self._stepper.max_in_flight:
            self._provide_pages()
            batch = self._scheduler.schedule()
            if batch.chunks:
                self._stepper.start_prompts(batch.chunks)
                prompts_end |= any(chunk.is_last for chunk in batch.chunks)
            elif batch.sequences:
                step_context = self._stepper.step_context(batch.sequences)
                shape = None if batch.uses_logit_processor else self._shape(step_context)
                if shape is WAIT_FOR_TOKENS:
                    break
                self._scheduler.begin_step(batch)
                self._stepper.start(batch.sequences, shape, step_context)
            else:
                break
        if prompts_end and self._stepper.max_in_flight > 1:
            self._choose_ahead()

    def _provide_pages(self) -> None:
        """Allocate pages for the next launch; notify the stepper of sequences that changed."""
        changes = self._scheduler.provide_pages()
        for notify, sequences in (
            (self._stepper.release, changes.preempted),
            (self._stepper.grow, changes.grown),
            (self._stepper.pause, changes.paused),
            (self._stepper.resume, changes.resumed),
        ):
            for sequence in sequences:
                notify(sequence)
        for sequence in changes.resumed:
            if sequence.awaits_mask:
                self._stepper.pause(sequence)

    def _collect_masks(self) -> list[Event]:
        """Resume sequences whose masks have arrived; return the events that were held for them."""
        events: list[Event] = []
        for sequence in self._scheduler.awaiting_masks:
            assert sequence.guide is not None
            if not sequence.guide.ready(sequence.output):
                continue
            sequence.awaits_mask = False
            events += self._emission.release_held(sequence)
            if sequence.finish_reason is not None:
                events.append(FinishEvent(sequence.index, sequence.record()))
                self._release(sequence)
            elif not sequence.paused:
                self._stepper.resume(sequence)
        return events

    def _await_mask(self) -> bool:
        """Wait briefly for the oldest awaited mask. Return False if no sequence awaits one."""
        for sequence in self._scheduler.awaiting_masks:
            assert sequence.guide is not None
            sequence.guide.ready(sequence.output, timeout_s=_MASK_WAIT_S)
            return True
        return False

    def _emit(self, emitted: Sequence[NewTokens]) -> list[Event]:
        events: list[Event] = []
        ended: list[SequenceState] = []
        for new in emitted:
            sequence, new_events = new.sequence, self._emission.append(new)
            if sequence.guide is None or not self._holds_for_mask(sequence, new_events):
                events += new_events
            if sequence.finish_reason is not None:
                ended.append(sequence)
                events.append(FinishEvent(sequence.index, sequence.record()))
        # Sequences publish pages to the prefix cache before their pages are released.
        self._stepper.after_emit()
        for sequence in ended:
            self._release(sequence)
        return events

    def _holds_for_mask(self, sequence: SequenceState, events: Sequence[Event]) -> bool:
        """Hold events, and pause the sequence, until its remote guide's next mask arrives."""
        guide = sequence.guide
        if guide is None or not guide.is_remote or sequence.finish_reason is not None:
            return False
        sequence.held_events += events
        sequence.awaits_mask = True
        guide.prepare(sequence.output)
        self._stepper.pause(sequence)
        return True

    def _shape(self, step_context: StepContext) -> ChosenDraft | WaitForTokens:
        """Return the policy's choice, or the one made ahead for such a step.

        After a token that a guide refused, a step writes logits, which steps of some shapes do not.
        """
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            ahead, shape = chosen
            is_same_size = (ahead.batch, ahead.rows) == (step_context.batch, step_context.rows)
            if is_same_size and ahead.full_logits == step_context.full_logits:
                return shape
        return self._policy.shape(step_context)

    def _choose_ahead(self) -> None:
        """Choose and load the first step after a prefill launch while that launch runs."""
        draftable = self._scheduler.draftable
        if any(sequence.tokens_left > 1 for sequence in draftable):
            step_context = self._stepper.step_context(draftable)
            shape = self._policy.shape(step_context)
            # A host proposal needs the prompts' first tokens, which are not known yet.
            if shape is not WAIT_FOR_TOKENS and not isinstance(shape, ProposedDepths):
                self._chosen = (step_context, shape)
                self._stepper.prepare_step(draftable, shape)

    def _admit(self, queued: QueuedRequest, pages: dict[str, SequencePages]) -> SequenceState:
        if queued.preempted is None:
            sequence = self._emission.admit(queued.index, queued.request, pages)
            sequence.counters.cached_tokens = queued.match.tokens
        else:
            sequence = self._emission.restore(queued.preempted, pages)
        sequence.prefix, sequence.length = queued.prefix, queued.match.tokens
        # The queue may have raised the priority, which a later preemption must not undo.
        sequence.request, sequence.times_overtaken = queued.request, queued.times_overtaken
        self._stepper.admit(sequence)
        return sequence

    def _release(self, sequence: SequenceState) -> None:
        self._scheduler.retire(sequence)
        self._stepper.release(sequence)
        if sequence.guide is not None:
            sequence.guide.close()
