"""Who waits for pages, and in what order: by priority, then as they came, seldom overtaken."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, replace

from specbuild.runtime.cache.prefix import MatchResult, SequencePrefix
from specbuild.runtime.request import MOST_URGENT, Request, SequenceState

# Later requests of higher priority that may be admitted before one that waits.
MAX_OVERTAKES = 100
NOTHING_CACHED = MatchResult()


@dataclass(frozen=True, eq=False)
class QueuedRequest:
    """A request that waits for pages; ``preempted`` is what it was before it lost them.

    ``match`` is what the prefix cache had of ``prefix`` when it was admitted.
    """

    index: int
    request: Request
    preempted: SequenceState | None = None
    times_overtaken: int = 0
    prefix: SequencePrefix | None = None
    match: MatchResult = NOTHING_CACHED

    @property
    def num_tokens(self) -> int:
        """The tokens that it begins with: its prompt, and what it had emitted."""
        if self.preempted is None:
            return len(self.request.prompt_ids)
        return max(self.preempted.num_tokens, self.preempted.replay_until)


def rank(request: QueuedRequest | SequenceState) -> tuple[int, int]:
    """Who waits, and who runs, by priority and then by age: less comes first."""
    return (request.request.priority, request.index)


class RequestQueue:
    """Requests by priority, the lowest number first, and those of one priority as they came.

    Nobody starves: whom ``MOST_OVERTAKES`` later requests went before has the highest priority
    from then on, also once it runs.
    """

    def __init__(self) -> None:
        self._entries: list[QueuedRequest] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._entries)

    @property
    def first(self) -> QueuedRequest:
        """Who is next."""
        return self._entries[0]

    def add(self, entry: QueuedRequest) -> None:
        """Puts a request behind those that go before it."""
        insort(self._entries, entry, key=rank)

    def remove(self, index: int) -> QueuedRequest | None:
        """Takes a request out, which goes nowhere; None where it does not wait."""
        for place, entry in enumerate(self._entries):
            if entry.index == index:
                return self._entries.pop(place)
        return None

    def take(self, admitted: QueuedRequest) -> None:
        """Takes one out, who is admitted: before all who came earlier."""
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
        entry, times_overtaken=count, request=replace(entry.request, priority=MOST_URGENT)
    )
