"""Which sequences run next: admission by free pages, prefill in chunks, then decoding."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbuild.runtime.cache.pages import KvPools, SequencePages
from specbuild.runtime.engine_dir.manifest import Limits
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import Request, SequenceState

Admitted = Callable[[int, Request, dict[str, SequencePages]], SequenceState]

# The most sequences of a step in which such requests take part.
MostSequences = Callable[[Sequence[Request]], int]


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
    """One launch of the target: prompt chunks, or sequences to decode."""

    chunks: tuple[Chunk, ...] = ()
    sequences: tuple[SequenceState, ...] = ()


class Scheduler:
    """Admits requests in order while pages are free; prompts go before decoding.

    Requests are added and withdrawn at any time, and told apart by their numbers from 0 on.

    ``invariant_rows``: only among launches of up to so many rows has a row the same bits whatever
    shares its launch. Which prompts arrive together depends on drafts; so a larger chunk runs
    alone, and the chunks of a prompt are cut by its own length. ``most_sequences`` bounds how many
    run together by what they ask for; None: the limits alone do.
    """

    def __init__(
        self,
        limits: Limits,
        kv: KvPools,
        *,
        invariant_rows: int | None = None,
        most_sequences: MostSequences | None = None,
    ) -> None:
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: list[SequenceState] = []
        self._added = 0
        self._limits = limits
        self._invariant_rows = invariant_rows
        self._kv = kv
        self._most_sequences = most_sequences

    @property
    def finished(self) -> bool:
        """Whether every request is done."""
        return not self._waiting and not self._running

    @property
    def sequences(self) -> tuple[SequenceState, ...]:
        """The requests that were admitted and are not done."""
        return tuple(self._running)

    def add(self, request: Request) -> int:
        """Queues a request behind those that wait; its number."""
        self._waiting.append((self._added, request))
        self._added += 1
        return self._added - 1

    def withdraw(self, index: int) -> Request | None:
        """Takes a waiting request out of the queue; None where it does not wait."""
        for entry in self._waiting:
            if entry[0] == index:
                self._waiting.remove(entry)
                return entry[1]
        return None

    def running(self, index: int) -> SequenceState | None:
        """The sequence of an admitted request; None where it waits or is done."""
        return next((s for s in self._running if s.index == index), None)

    def schedule(self, admit: Admitted) -> Batch:
        """The next launch; ``admit`` makes the sequence of a request that has its pages.

        Raises RequestError where no request fits the free pages.
        """
        self._admit(admit)
        chunks = self._chunks()
        if chunks:
            return Batch(chunks=chunks)
        if not self._running:
            raise RequestError(
                f"prompt {self._waiting[0][1].id!r}: no free cache pages; another generation on "
                "this engine holds them: finish or close it first"
            )
        return Batch(sequences=tuple(self._running))

    def retire(self, sequence: SequenceState) -> None:
        """A sequence is done: its pages go back."""
        self._running.remove(sequence)
        self._kv.release(sequence.pages)

    def close(self) -> tuple[SequenceState, ...]:
        """Gives back what the sequences still running hold, and says which these were."""
        running = tuple(self._running)
        for sequence in running:
            self.retire(sequence)
        return running

    def _admit(self, admit: Admitted) -> None:
        while self._waiting and len(self._running) < self._limits.max_batch_size:
            index, request = self._waiting[0]
            if not self._takes(request):
                return
            wanted = self._kv.pages_wanted(len(request.prompt_ids) + request.token_budget)
            if not self._kv.can_admit(wanted):
                return
            self._waiting.popleft()
            self._running.append(admit(index, request, self._kv.admit(wanted)))

    def _takes(self, request: Request) -> bool:
        """Whether a step has rows for one more sequence that asks for what this one does."""
        if self._most_sequences is None:
            return True
        together = [*(sequence.request for sequence in self._running), request]
        return len(together) <= self._most_sequences(together)

    def _chunks(self) -> tuple[Chunk, ...]:
        """Prompt chunks of one launch: as many rows as it may have, oldest sequence first."""
        most = self._limits.max_rows
        capacity = most if self._invariant_rows is None else min(most, self._invariant_rows)
        chunks: list[Chunk] = []
        for sequence in self._running:
            left = len(sequence.request.prompt_ids) - sequence.length
            if left == 0:
                continue
            count = min(left, capacity if self._invariant_rows is None else most)
            chunk = Chunk(sequence, sequence.length, count)
            if count > capacity and not chunks:
                return (chunk,)
            if 0 < count <= capacity:
                chunks.append(chunk)
                capacity -= count
        return tuple(chunks)
