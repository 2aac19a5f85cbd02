"""Two slots of an inbox suffice and one does not: all interleavings of a small model.

The model follows the protocol, not the kernels. Words arrive in any order. A rank's launch stores
only after all earlier launches have ended, and may poll before that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

ROUNDS = 6

# For each thread of a rank, the number of finished steps.
Counts = tuple[int, ...]
# A word: the receiving rank, the sender, the element, its number.
Word = tuple[int, int, int, int]
State = tuple[tuple[Counts, ...], frozenset[Word], frozenset[Word]]


@dataclass(frozen=True)
class Model:
    """``ranks`` ranks with ``threads`` threads, one element each.

    A launch is a list of steps of each of its threads. ``separate_poll``: a launch of its own
    polls, after the one that stores. ``early``: it polls before it waits for that launch.
    """

    ranks: int
    threads: int
    slots: int
    separate_poll: bool = False
    early: bool = False

    @property
    def steps(self) -> list[tuple[str, int, int, int]]:
        """Return the steps of a thread: kind, number, distance of the peer, launch."""
        of_thread = []
        for number in range(1, ROUNDS + 1):
            stores = 2 * number if self.separate_poll else number
            polls = stores + 1 if self.separate_poll else stores
            of_thread += [("store", number, k, stores) for k in range(1, self.ranks)]
            of_thread += [("poll", number, k, polls) for k in range(1, self.ranks)]
        return of_thread

    def moves(self, state: State) -> Iterator[State]:
        """Yield every state that one step leads to."""
        done, flying, inbox = state
        for word in flying:
            yield done, flying - {word}, self._arrived(inbox, word)
        steps = self.steps
        for rank, counts in enumerate(done):
            for thread, count in enumerate(counts):
                if count == len(steps):
                    continue
                kind, number, distance, launch = steps[count]
                waits = not (self.early and kind == "poll")
                if waits and any(c < len(steps) and steps[c][3] < launch for c in counts):
                    continue
                peer = (rank + distance) % self.ranks
                after = (*counts[:thread], count + 1, *counts[thread + 1 :])
                moved = (*done[:rank], after, *done[rank + 1 :])
                if kind == "store":
                    yield moved, flying | {(peer, rank, thread, number)}, inbox
                elif (rank, peer, thread, number) in inbox:
                    yield moved, flying, inbox

    def _arrived(self, inbox: frozenset[Word], word: Word) -> frozenset[Word]:
        """Return the inbox after a word replaced the previous one of its slot."""
        *place, number = word
        others = {w for w in inbox if [*w[:3]] != place or (w[3] - number) % self.slots}
        return frozenset(others | {word})

    def stuck(self) -> State | None:
        """Return a state that is not final and has no successor, or None."""
        begin: State = (((0,) * self.threads,) * self.ranks, frozenset(), frozenset())
        visited, left = {begin}, [begin]
        while left:
            state = left.pop()
            following = list(self.moves(state))
            ended = all(c == len(self.steps) for counts in state[0] for c in counts)
            if not following and not ended:
                return state
            for one in following:
                if one not in visited:
                    visited.add(one)
                    left.append(one)
        return None


FORMS = [
    pytest.param(2, 1, False, False, id="2 ranks"),
    pytest.param(2, 2, False, False, id="2 ranks, 2 threads"),
    pytest.param(3, 1, False, False, id="3 ranks"),
    pytest.param(2, 1, True, True, id="2 ranks, another launch polls early"),
    pytest.param(2, 2, True, True, id="2 ranks, 2 threads, another launch polls early"),
]


@pytest.mark.parametrize(("ranks", "threads", "separate_poll", "early"), FORMS)
def test_two_slots_cannot_deadlock(
    ranks: int, threads: int, separate_poll: bool, early: bool
) -> None:
    assert Model(ranks, threads, 2, separate_poll, early).stuck() is None


@pytest.mark.parametrize(("ranks", "threads", "separate_poll", "early"), FORMS)
def test_one_slot_can_deadlock(ranks: int, threads: int, separate_poll: bool, early: bool) -> None:
    """A rank that is ahead overwrites a word of the previous round before it is read."""
    state = Model(ranks, threads, 1, separate_poll, early).stuck()
    assert state is not None
