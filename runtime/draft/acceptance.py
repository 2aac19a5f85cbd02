"""Running acceptance rates of drafts by position, and the expected tokens of steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt

from specbuild.runtime.draft.draft_models import model_of
from specbuild.runtime.engine_dir.manifest import DraftShape

# Weight of a prior, in observations, and of the running rate as the prior of the recent one.
PRIOR_WEIGHT = 4.0
RUNNING_WEIGHT = 6.0
# Decay of the counts per observation.
DECAY_RUNNING = 0.97
DECAY_RECENT = 0.8
# A sampled token equals the draft's token less often than a greedy one.
PRIOR_GREEDY = 0.6
PRIOR_SAMPLED = 0.4


class Acceptance:
    """Acceptance counts of each position of one kind of draft.

    p_i is the probability that level i is accepted if all levels before it are. The estimate comes
    from recent steps, with the running rate as a prior. When a text becomes predictable, the
    estimate rises within a few steps. Single random results change it little.
    """

    def __init__(self, depth: int) -> None:
        self._running = _DecayedCounts(depth, DECAY_RUNNING)
        self._recent = _DecayedCounts(depth, DECAY_RECENT)

    def learn(self, depths: Sequence[int], accepted: Sequence[int]) -> None:
        """Count a step in which ``accepted[b]`` of ``depths[b]`` verified levels were accepted."""
        for counts in (self._running, self._recent):
            counts.learn(depths, accepted)

    def estimates(self, prior: float) -> list[float]:
        """Return p_1, p_2, … of a chain; ``prior`` is the prior of p_1.

        The prior of a later position is the estimate of the position before it. Acceptance falls
        little along a chain, and without this prior an unreached position would never be tried.
        """
        estimates = []
        for position in range(self._running.depth):
            prior = self._running.estimate(position, prior, PRIOR_WEIGHT)
            estimates.append(self._recent.estimate(position, prior, RUNNING_WEIGHT))
        return estimates

    def corrected(self, priors: Iterable[float]) -> list[float]:
        """Return p_1, p_2, … from a prior for each position and the running counts."""
        return [self._running.estimate(i, p, PRIOR_WEIGHT) for i, p in enumerate(priors)]


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


class ShapeAcceptance:
    """The running acceptance of each shape, for one kind of request: greedy or sampled.

    All chains of a draft model share their counts by position. Each tree has separate counts. Its
    prior is the estimate of a chain, corrected for wider levels. ``priors`` has the prior of p_1 of
    a chain by model, ``prior`` is the value for all other models.
    """

    def __init__(
        self, shapes: Sequence[DraftShape], *, prior: float, priors: Mapping[str, float]
    ) -> None:
        self._shapes = shapes
        models = dict.fromkeys(map(model_of, shapes)) or {"": None}
        self._prior = {model: priors.get(model, prior) for model in models}
        chains = [shape for shape in shapes if shape.draft_top_k == 1]
        self._chains = {
            model: Acceptance(
                max((s.draft_depth for s in chains if model_of(s) == model), default=0)
            )
            for model in models
        }
        self._trees = {s: Acceptance(s.draft_depth) for s in shapes if s.draft_top_k > 1}
        self._tokens: list[float] | None = None
        self.has_learned = False

    @property
    def priors(self) -> dict[str, float]:
        """The prior of p_1 of a chain by model."""
        return self._prior

    @property
    def chains(self) -> dict[str, list[float]]:
        """The estimates p_1, p_2, … of a chain by model."""
        return {model: chain.estimates(self._prior[model]) for model, chain in self._chains.items()}

    @property
    def tokens(self) -> list[float]:
        """Expected tokens per step and sequence, without a draft and with each of the shapes."""
        if self._tokens is None:
            chains = self.chains
            self._tokens = [
                1.0,
                *(
                    expected_tokens(self._probabilities(shape, chains[model_of(shape)]))[-1]
                    for shape in self._shapes
                ),
            ]
        return self._tokens

    def probabilities(self, shape: DraftShape) -> list[float]:
        """Return p_1, p_2, … of the levels of a shape."""
        return self._probabilities(shape, self.chains[model_of(shape)])

    def _probabilities(self, shape: DraftShape, chain: list[float]) -> list[float]:
        depth = shape.draft_depth
        if shape.draft_top_k == 1:
            return chain[:depth]
        last = chain[-1] if chain else self._prior[model_of(shape)]
        levels = [*chain, *[last] * depth][:depth]
        width = shape.draft_tokens / depth
        return self._trees[shape].corrected(widened_acceptance(p, width) for p in levels)

    def learn(self, shape: DraftShape, depths: Sequence[int], accepted: Sequence[int]) -> None:
        """Count a step in which ``accepted[b]`` of ``depths[b]`` verified levels were accepted."""
        is_chain = shape.draft_top_k == 1
        counts = self._chains.get(model_of(shape)) if is_chain else self._trees.get(shape)
        if counts is not None:
            counts.learn(depths, accepted)
            self._tokens, self.has_learned = None, True


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
