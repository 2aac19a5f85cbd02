"""Which launch comes next: admission by rank and free pages, then prompts and steps in turns."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.prefix import PrefixLookup
from specbuild.runtime.cache.sequence_pages import SequencePages
from specbuild.runtime.decode.launch_rows import launch_rows
from specbuild.runtime.decode.on_demand import PageChanges, provide_pages
from specbuild.runtime.decode.request_queue import QueuedRequest, RequestQueue
from specbuild.runtime.engine_dir.manifest import Limits
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import Request, SequenceState
from specbuild.runtime.settings import DEFAULT_PREFILL, PrefillSchedule

CreateSequence = Callable[[QueuedRequest, dict[str, SequencePages]], SequenceState]

# The most sequences of a step in which such requests take part.
MaxSequences = Callable[[Sequence[Request]], int]


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens ``start … start + count − 1`` of a sequence."""

    sequence: SequenceState
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends here."""
        return self.start + self.count == len(self.sequence.request.prompt_ids)


@dataclass(frozen=True)
class Batch:
    """One launch of the target: prompt chunks, or sequences to decode. Empty: none is of use.

    ``apart``: the sequences are those that share no step with the others.
    """

    chunks: tuple[Chunk, ...] = ()
    sequences: tuple[SequenceState, ...] = ()
    uses_logit_processor: bool = False


class Scheduler:
    """Admits requests by rank while pages are free; prompts and decoding take turns.

    Requests are added and withdrawn at any time, and told apart by their numbers from 0 on.

    Prompts wait in a queue. A launch takes up its head, and with the rows that are left those
    behind; a head that does not end goes to the back. So every launch brings each prompt one place
    forward, and a short one waits for no more launches than there are prompts before it, however
    long these are.

    ``invariant_rows``: only among launches of up to so many rows has a row the same bits whatever
    shares its launch. Which prompts arrive together depends on drafts; so a larger chunk runs
    alone, and the chunks of a prompt are cut by its own length. ``most_sequences`` bounds how many
    run together by what they ask for; None: the limits alone do.

    Where a step's ``most_emitted`` tokens of a sequence are given, pages come on demand: requests
    are admitted with those of what they have, and :meth:`provide` gives them more.

    With ``prefixes``, prompts begin after the pages that the prefix cache has of them.

    Steps of sequences that are ``apart`` are shared with none of the others, and the two kinds take
    turns. One of them with a guide takes part in no step while one of its own is in flight: what it
    allows follows from the token before.
    """

    def __init__(
        self,
        limits: Limits,
        kv: KvPools,
        *,
        prefill: PrefillSchedule = DEFAULT_PREFILL,
        invariant_rows: int | None = None,
        max_sequences: MaxSequences | None = None,
        max_step_tokens: int | None = None,
        prefixes: PrefixLookup | None = None,
    ) -> None:
        self._last_used_processor = False
        self._waiting = RequestQueue()
        # Of those that wait or run, when they have to be done.
        self._deadlines_s: dict[int, float] = {}
        self._running: list[SequenceState] = []
        # Of those running, who has prompt rows that no launch has taken up.
        self._prompts: deque[SequenceState] = deque()
        self._added = 0
        self._steps = 0
        self._prefill = prefill
        self._limits = limits
        self._max_rows = min(limits.max_rows, prefill.max_rows or limits.max_rows)
        self._invariant_rows = invariant_rows
        self._kv = kv
        self._max_sequences = max_sequences
        self._max_step_tokens = max_step_tokens
        self._prefixes = prefixes

    @property
    def finished(self) -> bool:
        """Whether every request is done."""
        return not self._waiting and not self._running

    @property
    def sequences(self) -> tuple[SequenceState, ...]:
        """The requests that were admitted and are not done."""
        return tuple(self._running)

    @property
    def decodable(self) -> tuple[SequenceState, ...]:
        """Those whose prompts are read, or in flight to their end, and that steps may decode."""
        return tuple(
            s
            for s in self._running
            if s.length >= len(s.request.prompt_ids) and not s.paused and not s.awaits_mask
        )

    @property
    def awaiting_masks(self) -> tuple[SequenceState, ...]:
        """Running sequences that no step decodes until a mask arrives."""
        return tuple(s for s in self._running if s.awaits_mask)

    @property
    def draftable(self) -> tuple[SequenceState, ...]:
        """Those of them whose steps are shared."""
        return tuple(s for s in self.decodable if not s.uses_logit_processor)

    def add(self, request: Request) -> int:
        """Queues a request behind those that go before it; its number."""
        prefix = None
        if self._prefixes is not None:
            prefix = self._prefixes.cache.begin(request.ids, request.params.cache_salt)
        self._waiting.add(QueuedRequest(self._added, request, prefix=prefix))
        if request.deadline_s is not None:
            self._deadlines_s[self._added] = request.deadline_s
        self._added += 1
        return self._added - 1

    def withdraw(self, index: int) -> QueuedRequest | None:
        """Takes a waiting request out of the queue; None where it does not wait."""
        queued = self._waiting.remove(index)
        if queued is not None:
            self._deadlines_s.pop(index, None)
            self._trace("abort", None, queued.request)
        return queued

    def expired(self) -> list[int]:
        """The numbers of those that had to be done by now."""
        if not self._deadlines_s:
            return []
        now_s = time.monotonic()
        return [index for index, limit_s in self._deadlines_s.items() if limit_s <= now_s]

    def running_sequence(self, index: int) -> SequenceState | None:
        """The sequence of an admitted request; None where it waits or is done."""
        return next((s for s in self._running if s.index == index), None)

    def admit(self, create: CreateSequence) -> None:
        """Takes up who waits, by rank, while pages and rows are free.

        Whose prompt begins as one that is being read waits until that beginning is cached.
        ``admit`` makes the sequence of a request that has its pages. Raises RequestError where
        none runs and none fits.
        """
        while self._waiting and len(self._running) < self._limits.max_batch_size:
            queued = next(
                (queued for queued in self._waiting if not self._waits_for_prefix(queued)), None
            )
            if queued is None or not self._has_step_row(queued.request):
                break
            matched = self._with_match(queued)
            pages_needed = self._pages_for(matched)
            if pages_needed is None:
                break
            self._waiting.take(queued)
            pages = self._kv.admit(pages_needed, matched.match.shared, request=matched.request.id)
            sequence = create(matched, pages)
            sequence.capacity = self._kv.capacity(pages)
            if self._prefixes is not None and matched.prefix is not None:
                was_preempted = matched.preempted is not None
                self._prefixes.cache.admitted(
                    matched.prefix, matched.match, was_preempted=was_preempted
                )
            self._running.append(sequence)
            self._prompts.append(sequence)
        if not self._running:
            raise RequestError(
                f"prompt {self._waiting.first.request.id!r}: no free cache pages; another "
                "generation on this engine holds them: finish or close it first"
            )

    def provide_pages(self) -> PageChanges:
        """Pages on demand for the next step; who is preempted waits again, before its equals."""
        if self._max_step_tokens is None:
            return PageChanges()
        changes = provide_pages(self._running, self._kv, max_step_tokens=self._max_step_tokens)
        for sequence in changes.preempted:
            if sequence in self._prompts:
                self._prompts.remove(sequence)
            self._trace("preempt", sequence, sequence.request)
            self._waiting.add(
                QueuedRequest(sequence.index, sequence.request, sequence, prefix=sequence.prefix)
            )
        return changes

    def schedule(self) -> Batch:
        """The next launch; empty where others must be received first.

        Chunks of prompts are to start at once, a step with :meth:`begin_step` or not at all.
        """
        decodable = self.decodable
        decoding = tuple(s for s in decodable if s.num_output_tokens)
        step = self._next_step(decoding)
        can_step = bool(step.sequences) or len(decodable) > len(decoding)
        if self._prompts and (self._steps >= self._prefill.steps_between or not can_step):
            self._steps = 0
            return Batch(chunks=self._chunks(self._prefill_rows(decoding=bool(decoding))))
        return step

    def begin_step(self, step: Batch) -> None:
        """The step that was scheduled is started."""
        self._steps += 1
        for sequence in self._running if self._max_step_tokens else ():
            sequence.counters.paused_steps += sequence.paused
        self._last_used_processor = step.uses_logit_processor

    def _next_step(self, decoding: tuple[SequenceState, ...]) -> Batch:
        """The next step of those that decode: of the kind whose turn it is, if it can be."""
        by_kind: tuple[list[SequenceState], list[SequenceState]] = ([], [])
        for sequence in decoding:
            by_kind[sequence.uses_logit_processor].append(sequence)
        steps = [
            Batch(sequences=tuple(part), uses_logit_processor=bool(i))
            for i, part in enumerate(by_kind)
        ]
        startable = [kind for kind in steps if _can_start(kind)]
        return next(
            (k for k in startable if k.uses_logit_processor != self._last_used_processor),
            startable[0] if startable else Batch(),
        )

    def retire(self, sequence: SequenceState) -> None:
        """A sequence is done: its pages go back."""
        sequence.released = True
        self._running.remove(sequence)
        if sequence in self._prompts:
            self._prompts.remove(sequence)
        self._deadlines_s.pop(sequence.index, None)
        self._kv.release(sequence.pages)
        event = "abort" if sequence.finish_reason in (None, "abort", "deadline") else "finish"
        self._trace(event, sequence, sequence.request)

    def _trace(self, event: str, sequence: SequenceState | None, request: Request) -> None:
        """A line of the trace, where there is one."""
        if self._kv.trace is not None:
            owner = None if sequence is None else next(iter(sequence.pages.values())).owner
            self._kv.trace.add(event, owner=owner, request=request.id)

    def close(self) -> tuple[SequenceState, ...]:
        """Gives back what the sequences still running hold, and says which these were."""
        running = tuple(self._running)
        for sequence in running:
            self.retire(sequence)
        return running

    def _with_match(self, queued: QueuedRequest) -> QueuedRequest:
        """With what the prefix cache has of the prompt now."""
        if self._prefixes is None or queued.prefix is None:
            return queued
        return replace(queued, match=self._prefixes.match(queued.prefix))

    def _waits_for_prefix(self, queued: QueuedRequest) -> bool:
        """Whether one whose prompt is being read will have pages of this prompt: it waits for them.

        So choices of one prompt read it once. Who reads goes on, or is gone: nobody waits for good.
        """
        if self._prefixes is None or queued.prefix is None:
            return False
        reading = (s.prefix for s in self._prompts if s.prefix is not None)
        return self._prefixes.should_wait(queued.prefix, reading)

    def _pages_for(self, queued: QueuedRequest) -> dict[str, int] | None:
        """The pages with which a request begins; None where too few are free.

        All that it may need; on demand, those of the tokens that it has, where each that runs finds
        one more.
        """
        request, kv = queued.request, self._kv
        max_tokens = len(request.prompt_ids) + request.token_budget
        if self._max_step_tokens is None:
            pages_needed, free_margin = kv.pages_needed(max_tokens), 0
        elif any(sequence.paused for sequence in self._running):
            return None
        else:
            pages_needed = kv.pages_needed(max_tokens, initial_tokens=queued.num_tokens + 1)
            free_margin = len(self._running)
        to_reserve = kv.pages_to_reserve(pages_needed, queued.match.shared)
        return pages_needed if kv.can_admit(to_reserve, margin=free_margin) else None

    def _has_step_row(self, request: Request) -> bool:
        """Whether a step has rows for one more sequence that asks for what this one does."""
        if self._max_sequences is None:
            return True
        requests = [*(sequence.request for sequence in self._running), request]
        return len(requests) <= self._max_sequences(requests)

    def _prefill_rows(self, *, decoding: bool) -> int:
        """Rows that the next launch of prompts may have: the same for all where bits hang on it."""
        if self._invariant_rows is not None:
            return self._max_rows
        remaining = sum(len(s.request.prompt_ids) - s.length for s in self._prompts)
        return launch_rows(remaining, self._max_rows, decoding=decoding)

    def _chunks(self, max_rows: int) -> tuple[Chunk, ...]:
        """Prompt chunks of one launch of ``most`` rows at most, the queue's head first."""
        invariant = self._invariant_rows
        capacity = max_rows if invariant is None else min(max_rows, invariant)
        chunks: list[Chunk] = []
        for sequence in self._prompts:
            remaining = len(sequence.request.prompt_ids) - sequence.length
            count = min(remaining, capacity if invariant is None else max_rows)
            if 0 < count <= capacity or not chunks:
                chunks.append(Chunk(sequence, sequence.length, count))
                capacity -= count
        finished_prompts = [chunk.sequence for chunk in chunks if chunk.is_last]
        if not chunks[0].is_last:
            self._prompts.rotate(-1)
        self._prompts = deque(s for s in self._prompts if s not in finished_prompts)
        return tuple(chunks)


def _can_start(step: Batch) -> bool:
    """Whether a step of these sequences is of use, and what it needs of them is known."""
    of_use = any(s.tokens_left > s.valid_steps_in_flight for s in step.sequences)
    if not step.uses_logit_processor:
        return of_use
    return of_use and not any(
        s.guide is not None and s.valid_steps_in_flight for s in step.sequences
    )
