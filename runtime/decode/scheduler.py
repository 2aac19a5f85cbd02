"""Selects the next launch: admits requests, then alternates prefill launches and decoding steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.prefix import PrefixLookup
from specbuild.runtime.cache.sequence_pages import SequencePages
from specbuild.runtime.decode.on_demand import PageChanges, provide_pages
from specbuild.runtime.decode.prompt_launches import launch_rows, whole_steps
from specbuild.runtime.decode.request_queue import QueuedRequest, RequestQueue
from specbuild.runtime.engine_dir.manifest import Limits
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import Request, SequenceState
from specbuild.runtime.settings import DEFAULT_PREFILL, PrefillSchedule

CreateSequence = Callable[[QueuedRequest, dict[str, SequencePages]], SequenceState]

# Returns how many sequences a step can decode if they have these requests.
MaxSequences = Callable[[Sequence[Request]], int]


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens ``start … start + count − 1`` of a sequence."""

    sequence: SequenceState
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether this is the last chunk of the prompt."""
        return self.start + self.count == len(self.sequence.request.prompt_ids)


@dataclass(frozen=True)
class Batch:
    """One launch of the target: prompt chunks, or sequences to decode. Empty if none can start.

    ``uses_logit_processor``: this is a logit-processor step (:class:`Scheduler`).
    """

    chunks: tuple[Chunk, ...] = ()
    sequences: tuple[SequenceState, ...] = ()
    uses_logit_processor: bool = False


class Scheduler:
    """Admits requests by rank while pages are free; alternates prefill launches and decoding steps.

    Requests may be added and withdrawn at any time. Their numbers count from 0.

    **Prefill.** Prompts wait in a queue. A launch takes a chunk of the first prompt, and fills its
    remaining rows with the next ones. A prompt that is not finished moves to the end of the queue.
    So a short prompt waits for at most as many launches as there are prompts before it, however
    long they are.

    Rows are batch-invariant only in launches of up to ``invariant_rows`` rows. The drafts influence
    which prompts share a launch. So a larger chunk runs alone, and a prompt is split by its own
    length only. Launches of prompts end at multiples of ``prompt_step`` tokens of each prompt, or
    at its end: kernels that compute recurrent states in chunks give equal bits only for such cuts.
    ``max_sequences`` limits the running sequences by their requests; with None, only the engine's
    limits apply.

    **Pages.** ``max_step_tokens`` is the largest number of tokens a step emits per sequence. If it
    is given, pages are allocated on demand. Requests are then admitted with pages for the tokens
    they have, and :meth:`provide_pages` allocates more. With ``prefixes``, prompts reuse cached
    pages.

    **Masks.** A mask depends on the token before. So a sequence that ``needs_mask`` takes part in a
    step only after its previous step was received. Logit-processor steps decode the sequences that
    need a mask for every token. They are not shared with other sequences and have no draft. They
    alternate with ordinary steps.
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
        prompt_step: int = 1,
    ) -> None:
        self._last_used_processor = False
        self._waiting = RequestQueue()
        # Deadlines of waiting and running requests, by number.
        self._deadlines_s: dict[int, float] = {}
        self._running: list[SequenceState] = []
        # Running sequences with prompt rows that no launch has prefilled yet.
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
        self._prompt_step = prompt_step

    @property
    def finished(self) -> bool:
        """Whether every request has finished."""
        return not self._waiting and not self._running

    @property
    def sequences(self) -> tuple[SequenceState, ...]:
        """The sequences that were admitted and have not finished."""
        return tuple(self._running)

    @property
    def decodable(self) -> tuple[SequenceState, ...]:
        """The sequences that steps may decode.

        Their prefill is complete or in flight, and they are not paused.
        """
        return tuple(
            [
                s
                for s in self._running
                if s.length >= s.prompt_tokens and not s.paused and not s.awaits_mask
            ]
        )

    @property
    def awaiting_masks(self) -> tuple[SequenceState, ...]:
        """The running sequences that wait for a mask of a remote guide."""
        return tuple(s for s in self._running if s.awaits_mask)

    @property
    def draftable(self) -> tuple[SequenceState, ...]:
        """The decodable sequences that take part in ordinary steps, which may have a draft."""
        return tuple(s for s in self.decodable if not s.uses_logit_processor)

    def add(self, request: Request) -> int:
        """Queue a request; return its number."""
        prefix = None
        if self._prefixes is not None:
            prefix = self._prefixes.cache.begin(request.ids, request.params.cache_salt)
        self._waiting.add(QueuedRequest(self._added, request, prefix=prefix))
        if request.deadline_s is not None:
            self._deadlines_s[self._added] = request.deadline_s
        self._added += 1
        return self._added - 1

    def withdraw(self, index: int) -> QueuedRequest | None:
        """Remove a waiting request from the queue and return it; None if it is not waiting."""
        queued = self._waiting.remove(index)
        if queued is not None:
            self._deadlines_s.pop(index, None)
            self._trace("abort", None, queued.request)
        return queued

    def expired(self) -> list[int]:
        """The numbers of the requests whose deadlines have passed."""
        if not self._deadlines_s:
            return []
        now_s = time.monotonic()
        return [index for index, limit_s in self._deadlines_s.items() if limit_s <= now_s]

    def running_sequence(self, index: int) -> SequenceState | None:
        """The sequence of an admitted request; None if it is waiting or has finished."""
        return next((s for s in self._running if s.index == index), None)

    def admit(self, create: CreateSequence) -> None:
        """Admit waiting requests, by rank, while pages and rows are free.

        A prompt that shares a prefix with a prompt being prefilled waits until the prefix is
        cached. ``create`` returns the sequence of a request and its pages. Raises RequestError if
        no sequence is running and no request fits.
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
        """Allocate pages on demand for the next step. Preempted requests return to the queue."""
        if self._max_step_tokens is None:
            return PageChanges()
        changes = provide_pages(self._running, self._kv, max_step_tokens=self._max_step_tokens)
        for sequence in changes.preempted:
            if sequence in self._prompts:
                self._prompts.remove(sequence)
            self._trace("preempt", sequence, sequence.request)
            self._waiting.add(QueuedRequest.of_preempted(sequence))
        return changes

    def schedule(self) -> Batch:
        """Return the next launch; empty if a launch in flight must be received first.

        The caller starts chunks at once. It calls :meth:`begin_step` before it starts a step.
        """
        decodable = self.decodable
        decoding = tuple([s for s in decodable if s.num_tokens > s.prompt_tokens])
        step = self._next_step(decoding)
        can_step = bool(step.sequences) or len(decodable) > len(decoding)
        if self._prompts and (self._steps >= self._prefill.steps_between or not can_step):
            self._steps = 0
            return Batch(chunks=self._chunks(self._prefill_rows(decoding=bool(decoding))))
        return step

    def begin_step(self, step: Batch) -> None:
        """Count a scheduled step as started."""
        self._steps += 1
        for sequence in self._running if self._max_step_tokens else ():
            sequence.counters.paused_steps += sequence.paused
        self._last_used_processor = step.uses_logit_processor

    def _next_step(self, decoding: tuple[SequenceState, ...]) -> Batch:
        """Return the next step of these sequences, alternating between the kinds if possible."""
        by_kind: tuple[list[SequenceState], list[SequenceState]] = ([], [])
        waits = False
        for sequence in decoding:
            if sequence.needs_mask and sequence.valid_steps_in_flight:
                waits = True
            else:
                by_kind[sequence.uses_logit_processor].append(sequence)
        if waits and all(sequence.needs_mask for sequence in by_kind[False]):
            # Sequences that need masks share a step, rather than take turns.
            by_kind[False].clear()
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
        """Release the pages of a finished sequence."""
        sequence.released = True
        self._running.remove(sequence)
        if sequence in self._prompts:
            self._prompts.remove(sequence)
        self._deadlines_s.pop(sequence.index, None)
        self._kv.release(sequence.pages)
        event = "abort" if sequence.finish_reason in (None, "abort", "deadline") else "finish"
        self._trace(event, sequence, sequence.request)

    def _trace(self, event: str, sequence: SequenceState | None, request: Request) -> None:
        """Add a line to the page trace, if there is one."""
        if self._kv.trace is not None:
            owner = None if sequence is None else next(iter(sequence.pages.values())).owner
            self._kv.trace.add(event, owner=owner, request=request.id)

    def close(self) -> tuple[SequenceState, ...]:
        """Release all running sequences and return them."""
        running = tuple(self._running)
        for sequence in running:
            self.retire(sequence)
        return running

    def _with_match(self, queued: QueuedRequest) -> QueuedRequest:
        """Add the pages that the prefix cache holds of the prompt now."""
        if self._prefixes is None or queued.prefix is None:
            return queued
        return replace(queued, match=self._prefixes.match(queued.prefix))

    def _waits_for_prefix(self, queued: QueuedRequest) -> bool:
        """Return whether a prompt that is being prefilled will publish pages of this prompt.

        With n > 1 the prompt is prefilled once, and the other choices wait. The leading sequence
        finishes or is released, so they cannot wait forever.
        """
        if self._prefixes is None or queued.prefix is None:
            return False
        prefilling = (s.prefix for s in self._prompts if s.prefix is not None)
        return self._prefixes.should_wait(queued.prefix, prefilling)

    def _pages_for(self, queued: QueuedRequest) -> dict[str, int] | None:
        """Return the pages that a request needs at admission, by group; None if too few are free.

        Without allocation on demand these are all pages of the request. With it they cover its
        current tokens, and one more page per running sequence must stay free.
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
        """Return whether steps have a row for one more sequence with this request."""
        if self._max_sequences is None:
            return True
        requests = [*(sequence.request for sequence in self._running), request]
        return len(requests) <= self._max_sequences(requests)

    def _prefill_rows(self, *, decoding: bool) -> int:
        """Return the row limit of the next prefill launch.

        It is constant on executors whose results depend on the size of a launch.
        """
        if self._invariant_rows is not None:
            return self._max_rows
        remaining = sum(len(s.request.prompt_ids) - s.length for s in self._prompts)
        return launch_rows(remaining, self._max_rows, decoding=decoding)

    def _chunks(self, max_rows: int) -> tuple[Chunk, ...]:
        """Select prompt chunks for a launch of at most ``max_rows`` rows, in queue order."""
        invariant = self._invariant_rows
        capacity = max_rows if invariant is None else min(max_rows, invariant)
        chunks: list[Chunk] = []
        for sequence in self._prompts:
            remaining = self._launch_end(sequence) - sequence.length
            count = min(remaining, capacity if invariant is None else max_rows)
            if count < remaining:
                count = whole_steps(
                    sequence.length, count, remaining, step=self._prompt_step, is_first=not chunks
                )
            if 0 < count <= capacity or not chunks:
                chunks.append(Chunk(sequence, sequence.length, count))
                capacity -= count
        finished_prompts = [chunk.sequence for chunk in chunks if chunk.is_last]
        if not chunks[0].is_last:
            self._prompts.rotate(-1)
        self._prompts = deque(s for s in self._prompts if s not in finished_prompts)
        return tuple(chunks)

    def _launch_end(self, sequence: SequenceState) -> int:
        """Return the prompt's end, or the position of its next snapshot of recurrent states."""
        prompt_tokens = len(sequence.request.prompt_ids)
        if self._prefixes is None or self._prefixes.cache.snapshots is None:
            return prompt_tokens
        return self._prefixes.cache.snapshots.next_position(sequence.length, prompt_tokens)


def _can_start(step: Batch) -> bool:
    """Return whether a step would emit tokens and may start now.

    The masked step of a sequence starts only after its previous step was received.
    """
    emits_tokens = any(s.tokens_left > s.valid_steps_in_flight for s in step.sequences)
    if not step.uses_logit_processor:
        return emits_tokens
    return emits_tokens and not any(
        s.guide is not None and s.valid_steps_in_flight for s in step.sequences
    )
