"""How often drafts are accepted, by position: a running estimate that starts from a belief."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import sqrt

# Pseudo-observations of what is believed of a position before the first step, and of what was
# seen on the long run against what was seen just now; how fast these fade, and what is steady.
PRIOR_WEIGHT = 4.0
MEDIUM_WEIGHT = 6.0
DECAY_MEDIUM = 0.97
DECAY_LONG = 0.99
DECAY_RECENT = 0.8
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
        self._long_term = _DecayedCounts(depth, DECAY_LONG)
        self._medium_term = _DecayedCounts(depth, DECAY_MEDIUM)
        self._recent = _DecayedCounts(depth, DECAY_RECENT)

    def learn(self, depths: Sequence[int], accepted: Sequence[int]) -> None:
        """Of ``depths[b]`` levels that were verified ``accepted[b]`` were accepted."""
        for counts in (self._long_term, self._medium_term, self._recent):
            counts.learn(depths, accepted)

    def long_term(self, prior: float) -> list[float]:
        """As :meth:`along`, of so many steps that luck hardly tells two drafts apart."""
        estimates = []
        for position in range(self._long_term.depth):
            prior = self._long_term.estimate(position, prior, PRIOR_WEIGHT)
            estimates.append(prior)
        return estimates

    def estimates(self, prior: float) -> list[float]:
        """p_1, p_2, … of a chain, where ``prior`` is believed of p_1 before the first step.

        A later position is believed to be like the one before it until it was tried: acceptance
        hardly falls along a chain, and a position that no chain reaches would otherwise never be
        tried.
        """
        estimates = []
        for position in range(self._medium_term.depth):
            prior = self._medium_term.estimate(position, prior, PRIOR_WEIGHT)
            estimates.append(self._recent.estimate(position, prior, MEDIUM_WEIGHT))
        return estimates

    def corrected(self, priors: Iterable[float]) -> list[float]:
        """p_1, p_2, … where each position has a belief of its own, which ends the list."""
        return [self._medium_term.estimate(i, p, PRIOR_WEIGHT) for i, p in enumerate(priors)]


class _DecayedCounts:
    """Counts of each position, in which the newer counts more."""

    def __init__(self, depth: int, decay: float) -> None:
        self.depth = depth
        self._decay = decay
        self._accepted = [0.0] * depth
        self._trials = [0.0] * depth

    def estimate(self, position: int, prior: float, weight: float) -> float:
        """The share that was accepted, with ``weight`` pseudo-observations of a belief."""
        hits, trials = self._accepted[position], self._trials[position]
        return (hits + weight * prior) / (trials + weight)

    def learn(self, depths: Sequence[int], accepted: Sequence[int]) -> None:
        """Sequences of one step fade together: the next step's count as much more as their number
        says, whatever their order was."""
        capacity, decay = self.depth, self._decay
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
            kept = decay**trials
            weight = (1 - kept) / (trials * (1 - decay))
            self._accepted[i] = kept * self._accepted[i] + weight * hits
            self._trials[i] = kept * self._trials[i] + weight * trials


def widened_acceptance(probability: float, width: float) -> float:
    """What a level of ``width`` nodes is believed to accept where one node accepts ``chance``.

    Of the misses a share of 1 − 1/√width is caught by the other nodes.
    """
    return 1 - (1 - probability) / sqrt(max(width, 1.0))


def expected_tokens(probabilities: Iterable[float]) -> list[float]:
    """Tokens that a step emits with 0, 1, 2, … levels: 1 + Σ_{k=1…d} Π_{i≤k} p_i."""
    expected, cumulative = [1.0], 1.0
    for probability in probabilities:
        cumulative *= probability
        expected.append(expected[-1] + cumulative)
    return expected


def acceptance_prior(sampled: bool, learned: float | None = None) -> float:
    """What a run may believe of acceptance: half experience of an earlier one, half the general."""
    general = PRIOR_SAMPLED if sampled else PRIOR_GREEDY
    return general if learned is None else (general + learned) / 2
