"""Two slots of an inbox are enough, and one is not: every order of steps of a small model.

The model is written from the protocol, not from the kernels: words travel on their own and arrive
in any order, launches of a rank store only behind all launches in front, and may poll before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

ROUNDS = 6

# Of each thread of a rank, how many of its steps are done.
Counts = tuple[int, ...]
# A word: the rank that receives it, the sender, the element, its number.
Word = tuple[int, int, int, int]
State = tuple[tuple[Counts, ...], frozenset[Word], frozenset[Word]]


@dataclass(frozen=True)
class Model:
    """``ranks`` ranks with ``threads`` threads, one element each.

    A launch is a list of steps of each of its threads. ``apart``: what polls is a launch of its
    own, behind the one that stores. ``early``: it polls before it waits for that one.
    """

    ranks: int
    threads: int
    slots: int
    apart: bool = False
    early: bool = False

    @property
    def steps(self) -> list[tuple[str, int, int, int]]:
        """Of a thread in order: what it does, the number, the peer's distance, the launch."""
        found = []
        for number in range(1, ROUNDS + 1):
            stores = 2 * number if self.apart else number
            polls = stores + 1 if self.apart else stores
            found += [("store", number, k, stores) for k in range(1, self.ranks)]
            found += [("poll", number, k, polls) for k in range(1, self.ranks)]
        return found

    def moves(self, state: State) -> Iterator[State]:
        """Every state that one step leads to."""
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
        """A word takes the place of the one that has its slot."""
        *place, number = word
        kept = {w for w in inbox if [*w[:3]] != place or (w[3] - number) % self.slots}
        return frozenset(kept | {word})

    def stuck(self) -> State | None:
        """A state that is no end and leads nowhere; None where there is none."""
        begin: State = (((0,) * self.threads,) * self.ranks, frozenset(), frozenset())
        seen, left = {begin}, [begin]
        while left:
            state = left.pop()
            following = list(self.moves(state))
            ended = all(c == len(self.steps) for counts in state[0] for c in counts)
            if not following and not ended:
                return state
            for one in following:
                if one not in seen:
                    seen.add(one)
                    left.append(one)
        return None


FORMS = [
    pytest.param(2, 1, False, False, id="2 ranks"),
    pytest.param(2, 2, False, False, id="2 ranks, 2 threads"),
    pytest.param(3, 1, False, False, id="3 ranks"),
    pytest.param(2, 1, True, True, id="2 ranks, another launch polls early"),
    pytest.param(2, 2, True, True, id="2 ranks, 2 threads, another launch polls early"),
]


@pytest.mark.parametrize(("ranks", "threads", "apart", "early"), FORMS)
def test_two_slots_are_enough(ranks: int, threads: int, apart: bool, early: bool) -> None:
    assert Model(ranks, threads, 2, apart, early).stuck() is None


@pytest.mark.parametrize(("ranks", "threads", "apart", "early"), FORMS)
def test_one_slot_is_not(ranks: int, threads: int, apart: bool, early: bool) -> None:
    """A rank that is ahead stores the next round over a word that nobody has read."""
    state = Model(ranks, threads, 1, apart, early).stuck()
    assert state is not None
