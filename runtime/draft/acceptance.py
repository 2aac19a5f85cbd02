"""Estimate acceptance rates by draft position, starting from a prior."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import sqrt

# Weight of a prior, in observations.
PRIOR_WEIGHT = 4.0
# Weight of the medium-term estimate as the prior of the recent one, in observations.
MEDIUM_WEIGHT = 6.0
# Decay of each kind of count per observation.
DECAY_MEDIUM = 0.97
DECAY_LONG = 0.99
DECAY_RECENT = 0.8
# A sampled token equals the draft's most likely token less often than a greedy one.
PRIOR_GREEDY = 0.6
PRIOR_SAMPLED = 0.4


class Acceptance:
    """Acceptance counts of each position of one kind of draft.

    p_i is the probability that level i is accepted if all levels before it are. The estimate comes
    from recent steps, with the medium-term rate as a prior of ``MEDIUM_WEIGHT`` observations. When
    a text becomes predictable, the estimate rises within a few steps. Single random results change
    it little.
    """

    def __init__(self, depth: int) -> None:
        self._long_term = _DecayedCounts(depth, DECAY_LONG)
        self._medium_term = _DecayedCounts(depth, DECAY_MEDIUM)
        self._recent = _DecayedCounts(depth, DECAY_RECENT)

    def learn(self, depths: Sequence[int], accepted: Sequence[int]) -> None:
        """Count a step in which ``accepted[b]`` of ``depths[b]`` verified levels were accepted."""
        for counts in (self._long_term, self._medium_term, self._recent):
            counts.learn(depths, accepted)

    def long_term(self, prior: float) -> list[float]:
        """Return p_1, p_2, … from long-term counts, to compare two drafts."""
        estimates = []
        for position in range(self._long_term.depth):
            prior = self._long_term.estimate(position, prior, PRIOR_WEIGHT)
            estimates.append(prior)
        return estimates

    def estimates(self, prior: float) -> list[float]:
        """Return p_1, p_2, … of a chain; ``prior`` is the prior of p_1.

        The prior of a later position is the estimate of the position before it. Acceptance falls
        little along a chain, and without this prior an unreached position would never be tried.
        """
        estimates = []
        for position in range(self._medium_term.depth):
            prior = self._medium_term.estimate(position, prior, PRIOR_WEIGHT)
            estimates.append(self._recent.estimate(position, prior, MEDIUM_WEIGHT))
        return estimates

    def corrected(self, priors: Iterable[float]) -> list[float]:
        """Return p_1, p_2, … from a prior for each position and the medium-term counts."""
        return [self._medium_term.estimate(i, p, PRIOR_WEIGHT) for i, p in enumerate(priors)]


class _DecayedCounts:
    """Exponentially decayed counts of each position."""

    def __init__(self, depth: int, decay: float) -> None:
        self.depth = depth
        self._decay = decay
        self._accepted = [0.0] * depth
        self._trials = [0.0] * depth

    def estimate(self, position: int, prior: float, weight: float) -> float:
        """Return the accepted share; the prior counts as ``weight`` observations."""
        hits, trials = self._accepted[position], self._trials[position]
        return (hits + weight * prior) / (trials + weight)

    def learn(self, depths: Sequence[int], accepted: Sequence[int]) -> None:
        """Count a step. All sequences of the step have the same weight."""
        max_depth, decay = self.depth, self._decay
        # Sequences by the number of their levels that were tried, and that were accepted.
        by_tried, by_accepted = [0] * (max_depth + 1), [0] * (max_depth + 1)
        for (depth, num_accepted), count in Counter(zip(depths, accepted, strict=True)).items():
            verified = min(depth, max_depth)
            by_accepted[min(num_accepted, verified)] += count
            by_tried[min(num_accepted + 1, verified)] += count
        trials, hits = 0, 0
        for i in range(max_depth - 1, -1, -1):
            trials += by_tried[i + 1]
            hits += by_accepted[i + 1]
            if trials == 0:
                continue
            old_weight = decay**trials
            weight = (1 - old_weight) / (trials * (1 - decay))
            self._accepted[i] = old_weight * self._accepted[i] + weight * hits
            self._trials[i] = old_weight * self._trials[i] + weight * trials


def widened_acceptance(probability: float, width: float) -> float:
    """Return the acceptance of a level of ``width`` nodes, given that of its best node.

    Assumption: if the best node is wrong, another one is right with probability 1 − 1/√width.
    """
    return 1 - (1 - probability) / sqrt(max(width, 1.0))


def expected_tokens(probabilities: Iterable[float]) -> list[float]:
    """Return the expected tokens of a step with 0, 1, 2, … levels: 1 + Σ_{k=1…d} Π_{i≤k} p_i."""
    expected, cumulative = [1.0], 1.0
    for probability in probabilities:
        cumulative *= probability
        expected.append(expected[-1] + cumulative)
    return expected


def acceptance_prior(sampled: bool, learned: float | None = None) -> float:
    """Return the prior of a run: the general prior, or its mean with an earlier run's estimate."""
    general = PRIOR_SAMPLED if sampled else PRIOR_GREEDY
    return general if learned is None else (general + learned) / 2
