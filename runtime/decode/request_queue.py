"""The queue of requests that wait for pages: by priority, then arrival, without starvation."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, replace

from specbuild.runtime.cache.prefix import MatchResult, SequencePrefix
from specbuild.runtime.request import MAX_URGENT, Request, SequenceState

# Number of later requests that may be admitted before an earlier one.
MAX_OVERTAKES = 100
NOTHING_CACHED = MatchResult()


@dataclass(frozen=True, eq=False)
class QueuedRequest:
    """A request that waits for pages. ``preempted`` is its state before it lost its pages.

    ``match`` holds the cached pages of ``prefix`` at admission.
    """

    index: int
    request: Request
    preempted: SequenceState | None = None
    times_overtaken: int = 0
    prefix: SequencePrefix | None = None
    match: MatchResult = NOTHING_CACHED

    @classmethod
    def of_preempted(cls, sequence: SequenceState) -> QueuedRequest:
        """Return a sequence that lost its pages, with the priority and count that it left with."""
        return cls(
            sequence.index, sequence.request, sequence, sequence.times_overtaken, sequence.prefix
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens at the start: the prompt, and tokens emitted before a preemption."""
        if self.preempted is None:
            return len(self.request.prompt_ids)
        return max(self.preempted.num_tokens, self.preempted.replay_until)


def rank(request: QueuedRequest | SequenceState) -> tuple[int, int]:
    """The sort key of waiting and running requests: priority, then arrival. Lower comes first."""
    return (request.request.priority, request.index)


class RequestQueue:
    """Requests ordered by priority, lowest number first, then by arrival.

    When ``MAX_OVERTAKES`` later requests have overtaken a request, it gets the highest priority,
    and keeps it while it runs. So no request starves.
    """

    def __init__(self) -> None:
        self._entries: list[QueuedRequest] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._entries)

    @property
    def first(self) -> QueuedRequest:
        """The next request to admit."""
        return self._entries[0]

    def add(self, entry: QueuedRequest) -> None:
        """Insert a request after those that rank before it."""
        insort(self._entries, entry, key=rank)

    def remove(self, index: int) -> QueuedRequest | None:
        """Remove and return a request; None if it is not waiting."""
        for place, entry in enumerate(self._entries):
            if entry.index == index:
                return self._entries.pop(place)
        return None

    def take(self, admitted: QueuedRequest) -> None:
        """Remove an admitted request, and count it as overtaking all earlier requests."""
        self._entries.remove(admitted)
        if any(entry.index < admitted.index for entry in self._entries):
            self._entries = sorted(
                (_overtake(entry, admitted) for entry in self._entries), key=rank
            )


def _overtake(entry: QueuedRequest, admitted: QueuedRequest) -> QueuedRequest:
    if entry.index > admitted.index:
        return entry
    count = entry.times_overtaken + 1
    if count < MAX_OVERTAKES:
        return replace(entry, times_overtaken=count)
    return replace(
        entry, times_overtaken=count, request=replace(entry.request, priority=MAX_URGENT)
    )
