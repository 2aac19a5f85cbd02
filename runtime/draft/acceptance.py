"""How often drafts are accepted, by position: a running estimate that starts from a belief."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import sqrt

# Pseudo-observations of what is believed of a position before the first step, and of what was
# seen on the long run against what was seen just now; how fast these fade, and what is steady.
PRIOR_WEIGHT = 4.0
LONG_WEIGHT = 6.0
FORGETTING = 0.97
FORGETTING_STEADY = 0.99
FORGETTING_NOW = 0.8
# A sampled token is a draft's likeliest one less often than a greedy one.
PRIOR_GREEDY = 0.6
PRIOR_SAMPLED = 0.4


class Acceptance:
    """What was seen of each position of one kind of draft.

    p_i is the chance that level i is accepted once those before it were: what the last few steps
    accepted, with what many did as a belief of ``LONG_WEIGHT`` steps. So text that becomes
    predictable is noticed within a few steps, and a lucky step changes little.
    """

    def __init__(self, depth: int) -> None:
        self._steady = _Faded(depth, FORGETTING_STEADY)
        self._long = _Faded(depth, FORGETTING)
        self._now = _Faded(depth, FORGETTING_NOW)

    def learn(self, depths: Sequence[int], accepted: Sequence[int]) -> None:
        """Of ``depths[b]`` levels that were verified ``accepted[b]`` were accepted."""
        for seen in (self._steady, self._long, self._now):
            seen.learn(depths, accepted)

    def steadily(self, prior: float) -> list[float]:
        """As :meth:`along`, of so many steps that luck hardly tells two drafts apart."""
        estimates, believed = [], prior
        for position in range(self._steady.depth):
            believed = self._steady.estimate(position, believed, PRIOR_WEIGHT)
            estimates.append(believed)
        return estimates

    def along(self, prior: float) -> list[float]:
        """p_1, p_2, … of a chain, where ``prior`` is believed of p_1 before the first step.

        A later position is believed to be like the one before it until it was tried: acceptance
        hardly falls along a chain, and a position that no chain reaches would otherwise never be
        tried.
        """
        estimates, believed = [], prior
        for position in range(self._long.depth):
            believed = self._long.estimate(position, believed, PRIOR_WEIGHT)
            estimates.append(self._now.estimate(position, believed, LONG_WEIGHT))
        return estimates

    def against(self, believed: Iterable[float]) -> list[float]:
        """p_1, p_2, … where each position has a belief of its own, which ends the list."""
        return [self._long.estimate(i, p, PRIOR_WEIGHT) for i, p in enumerate(believed)]


class _Faded:
    """Counts of each position, in which the newer counts more."""

    def __init__(self, depth: int, forgetting: float) -> None:
        self.depth = depth
        self._forgetting = forgetting
        self._accepted = [0.0] * depth
        self._trials = [0.0] * depth

    def estimate(self, position: int, believed: float, weight: float) -> float:
        """The share that was accepted, with ``weight`` pseudo-observations of a belief."""
        hits, trials = self._accepted[position], self._trials[position]
        return (hits + weight * believed) / (trials + weight)

    def learn(self, depths: Sequence[int], accepted: Sequence[int]) -> None:
        """Sequences of one step fade together: the next step's count as much more as their number
        says, whatever their order was."""
        capacity, forgetting = self.depth, self._forgetting
        last, reached_by = [0] * (capacity + 1), [0] * (capacity + 1)
        for (depth, reached), count in Counter(zip(depths, accepted, strict=True)).items():
            tried = min(depth, capacity)
            reached_by[min(reached, tried)] += count
            last[min(reached + 1, tried)] += count
        trials, hits = 0, 0
        for i in range(capacity - 1, -1, -1):
            trials += last[i + 1]
            hits += reached_by[i + 1]
            if trials == 0:
                continue
            kept = forgetting**trials
            weight = (1 - kept) / (trials * (1 - forgetting))
            self._accepted[i] = kept * self._accepted[i] + weight * hits
            self._trials[i] = kept * self._trials[i] + weight * trials


def widened(chance: float, width: float) -> float:
    """What a level of ``width`` nodes is believed to accept where one node accepts ``chance``.

    Of the misses a share of 1 − 1/√width is caught by the other nodes.
    """
    return 1 - (1 - chance) / sqrt(max(width, 1.0))


def expected_tokens(chances: Iterable[float]) -> list[float]:
    """Tokens that a step emits with 0, 1, 2, … levels: 1 + Σ_{k=1…d} Π_{i≤k} p_i."""
    expected, reach = [1.0], 1.0
    for chance in chances:
        reach *= chance
        expected.append(expected[-1] + reach)
    return expected


def prior_of(sampled: bool, learned: float | None = None) -> float:
    """What a run may believe of acceptance: half experience of an earlier one, half the general."""
    general = PRIOR_SAMPLED if sampled else PRIOR_GREEDY
    return general if learned is None else (general + learned) / 2
