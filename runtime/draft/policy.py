"""Draft policies: a fixed shape, no draft, or the fastest shape by measured costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Protocol, TypeAlias

from specbuild.runtime.draft.acceptance import (
    PRIOR_GREEDY,
    PRIOR_SAMPLED,
    ShapeAcceptance,
    acceptance_prior,
)
from specbuild.runtime.draft.costs import DraftCosts, StepContext, StepTimes
from specbuild.runtime.draft.draft_models import RaggedShape, by_model, model_of, shape_text
from specbuild.runtime.draft.host_proposal import ProposedDepths, WaitForTokens
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest


@dataclass(frozen=True, slots=True)
class SequenceDepths:
    """A choice to verify the first ``depths[b]`` tokens of sequence b's chain of ``shape``."""

    shape: RaggedShape
    depths: tuple[int, ...]


# The draft of a step: a shape for a draft model, a ragged one with depths, chains of a host
# proposal, or None.
ChosenDraft: TypeAlias = DraftShape | SequenceDepths | ProposedDepths | None

# Factor by which the expected rate must rise for another kind of step.
MARGIN = 1.02
# Share of the time that exploration may cost.
EXPLORATION_SHARE = 0.02
# The budget includes the share of this number of future steps as credit.
CREDIT_STEPS = 64
# Exploration bonus of an untried kind, relative to its rate.
OPTIMISM = 0.5
# Decay per step of the number of trials.
DECAY = 0.98
# Weight of a trial of one chain for a chain that is one level longer or shorter.
SIMILARITY = 0.8
# Cost of a switch of the draft model, as a share of a step without a draft.
SWITCH_COST = 0.1


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a step.

    ``accepted[b]`` of ``depths[b]`` verified levels were accepted. ``step_s`` is None if the step
    has no usable time, for example because it includes other work. ``sampled[b]``: the request of
    sequence b has a temperature above 0; by default all of them, or none if the context has none.
    ``sequences`` are their indices.
    """

    step_context: StepContext
    shape: ChosenDraft
    depths: Sequence[int]
    accepted: Sequence[int]
    step_s: float | None
    sampled: Sequence[bool] | None = None
    sequences: Sequence[int] = ()


class DraftPolicy(Protocol):
    """Chooses a shape before each step and observes the outcome."""

    @property
    def max_depth(self) -> int:
        """The largest depth that the policy may choose; 0 for no draft."""
        ...

    @property
    def reason(self) -> str:
        """The reason of the current choice."""
        ...

    def shape(self, step_context: StepContext) -> ChosenDraft | WaitForTokens:
        """Return the shape for the next step; None for a step without a draft.

        While tokens are in flight it may return ``WAIT_FOR_TOKENS``: the caller then starts no
        step until the host has these tokens.
        """
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a finished step. The shapes of later steps may already be chosen."""
        ...


class FixedPolicy:
    """A policy that always returns the same shape, or None for no draft."""

    def __init__(self, shape: DraftShape | None, *, max_depth: int, reason: str) -> None:
        self._shape = shape
        self.max_depth = max_depth
        self.reason = reason

    def shape(self, step_context: StepContext) -> DraftShape | None:
        """Return the fixed shape."""
        del step_context
        return self._shape

    def observe(self, outcome: StepOutcome) -> None:
        """Do nothing."""


def no_draft_policy(*, max_depth: int = 0) -> FixedPolicy:
    """Return the policy of an engine without a drafter.

    Steps may verify ``max_depth`` tokens that guides force.
    """
    return FixedPolicy(None, max_depth=max_depth, reason="the engine has no draft")


def default_policy(manifest: Manifest, why: str) -> FixedPolicy:
    """Return a policy with the default shape; ``why`` states why it has no measured costs."""
    shape = manifest.draft_default
    if not manifest.drafters or shape is None:
        return no_draft_policy()
    reason = f"the engine's default, for {why}"
    return FixedPolicy(shape, max_depth=shape.draft_depth, reason=reason)


class MeasuredPolicy:
    """Chooses the draft with the most expected tokens per second, from costs and acceptance.

    Let p_i be the probability that level i is accepted if all levels before it are, and t_k the
    time of a step of kind k (no draft, or one of the shapes). The rate of a draft of d levels is

        r_k = (1 + Σ_{j=1…d} Π_{i≤j} p_i) / t_k.

    The policy uses the kind with the largest rate, r_best. It explores another kind k if

        u_k = r_k · (1 + ½ / √(1 + n_k)) > r_best,    n_k = Σ 0.98^age over the trials of k.

    If several kinds satisfy this, the one with the largest u_k is explored. The cost of exploration
    is the sum of t_k − (tokens of k) / r_best over all trials. A trial must keep this cost within a
    share of the elapsed time. The budget includes the share of some future steps as credit, so
    exploration starts with the first steps. The bound u_k is that of discounted UCB (Garivier and
    Moulines, 2011). The budget is that of conservative bandits (Wu and others, 2016).

    A draft model that starts to draft must first ingest its pending rows. It is chosen only if the
    time saved exceeds the time for this.

    Acceptance is counted separately for greedy and for sampled requests. A batch with both expects
    the mean of their tokens.

    ``prior`` is the prior of p_1 of a chain for greedy requests. ``before`` is an earlier policy
    over the same shapes: its step times are reused, and half of what it learned of acceptance.
    ``exploration_share`` is the share of the time that exploration may cost.
    """

    def __init__(
        self,
        costs: DraftCosts,
        *,
        prior: float = PRIOR_GREEDY,
        before: MeasuredPolicy | None = None,
        exploration_share: float = EXPLORATION_SHARE,
    ) -> None:
        shapes = costs.shapes
        self.max_depth = max((shape.draft_depth for shape in shapes), default=0)
        self._costs = costs
        self._options: tuple[DraftShape | None, ...] = (None, *shapes)
        self._models = (None, *map(model_of, shapes))
        self._exploration_share = exploration_share
        self._trials = [0.0] * len(self._options)
        self._elapsed_s = self._exploration_cost_s = 0.0
        self._last = self._chosen = self._best = 0
        self._trial_steps_left = 0
        self._step_context = StepContext(1, 0, 0)
        self._times: dict[int, StepTimes] = {} if before is None else before._times
        self._acceptance = {
            sampled: ShapeAcceptance(
                shapes,
                prior=general,
                priors={} if before is None else before._learned_priors(sampled=sampled),
            )
            for sampled, general in ((False, prior), (True, PRIOR_SAMPLED))
        }

    def _learned_priors(self, *, sampled: bool) -> dict[str, float]:
        acceptance = self._acceptance[sampled]
        if not acceptance.has_learned:
            return acceptance.priors
        chains = acceptance.chains
        return {m: acceptance_prior(sampled, chain[0]) for m, chain in chains.items() if chain}

    @property
    def acceptance(self) -> list[float]:
        """The estimates p_1, p_2, … of a chain of the first draft model for greedy requests."""
        return next(iter(self.acceptance_by_model().values()))

    def acceptance_by_model(self, *, sampled: bool = False) -> dict[str, list[float]]:
        """Return p_1, p_2, … of a chain by draft model; a single model has the empty name."""
        return self._acceptance[sampled].chains

    @property
    def reason(self) -> str:
        """The best draft of the last step, with its expected rate and acceptance."""
        rates, shape = self._rates(self._step_context), self._options[self._best]
        acceptance = self._acceptance[self._step_context.num_sampled > 0]
        probabilities = (
            next(iter(acceptance.chains.values()))[:1]
            if shape is None
            else acceptance.probabilities(shape)
        )
        parts = [
            f"{_shape_phrase(shape)}: {rates[self._best]:.0f} tokens/s expected, {rates[0]:.0f} "
            "without a draft"
        ]
        if probabilities:
            by_position = " ".join(f"{p:.2f}" for p in probabilities)
            parts.append(f"acceptance by position {by_position}")
        return "; ".join((*parts, f"step times {self._costs.origin}"))

    def best_rate(self, step_context: StepContext) -> float:
        """Return the expected tokens per second and sequence of the best kind."""
        self._step_context = step_context
        rates = self._rates(step_context)
        return rates[self._best_of(rates)]

    def time_ratio(self, batch: int) -> float:
        """Return the measured time of a step without a draft, divided by its time in the table."""
        return self._times_of(batch).ratios()[0]

    def shape(self, step_context: StepContext) -> DraftShape | None:
        """Return the best draft, or another one to explore."""
        self._step_context = step_context
        rates = self._rates(step_context)
        self._best = self._best_of(rates)
        if self._trial_steps_left and rates[self._chosen] > 0:
            self._trial_steps_left -= 1
        else:
            self._trial_steps_left = 0
            self._chosen = self._explore(rates)
        chosen = self._chosen
        self._elapsed_s += self._tokens(step_context)[chosen] / rates[chosen]
        self._trials = [
            DECAY * n
            + (
                SIMILARITY ** abs(k - chosen)
                if chosen and self._same_model(chosen, k)
                else k == chosen
            )
            for k, n in enumerate(self._trials)
        ]
        return self._options[chosen]

    def _same_model(self, kind: int, other: int) -> bool:
        """Return whether two kinds use the same draft model, or both use none."""
        return self._models[kind] == self._models[other]

    def _best_of(self, rates: Sequence[float]) -> int:
        """Return the kind that emits the remaining tokens first; prefer simpler, current kinds."""
        leaders: dict[str | None, int] = {}
        for kind, rate in enumerate(rates):
            best = leaders.setdefault(self._models[kind], kind)
            # A ragged step drafts as another one does: it may replace that one for any gain.
            is_ragged = isinstance(self._options[kind], RaggedShape)
            if rate > rates[best] * (1.0 if is_ragged else MARGIN):
                leaders[self._models[kind]] = kind

        def time_left_s(kind: int) -> float:
            if not rates[kind]:
                return inf
            margin = 1.0 if not kind or self._same_model(self._chosen, kind) else MARGIN
            tokens_left = margin * self._step_context.tokens_left
            return tokens_left / rates[kind] + self._catch_up_s(kind)

        return min(leaders.values(), key=time_left_s)

    def _explore(self, rates: Sequence[float]) -> int:
        """Return the kind with the largest potential if the budget covers it, else the best."""
        potential = [rate * (1 + self._optimism(kind)) for kind, rate in enumerate(rates)]
        potential[self._best] = rates[self._best]
        kind = max(range(len(rates)), key=potential.__getitem__)
        if kind == self._best:
            return kind
        switches = not self._same_model(self._chosen, kind)
        # The time of the first step after a switch is not usable, so a trial needs a second step.
        steps = 2 if switches else 1
        tokens = self._tokens(self._step_context)[kind]
        cost_s = steps * max(tokens / rates[kind] - tokens / rates[self._best], 0.0)
        if switches:
            cost_s += SWITCH_COST / rates[0]
        # When the best model drafts again, it must ingest the rows that the trial left pending.
        if switches or not self._same_model(self._best, kind):
            cost_s += self._catch_up_s(kind)
        left_s = min(self._step_context.tokens_left / rates[self._best], CREDIT_STEPS / rates[0])
        if self._exploration_cost_s + cost_s > self._exploration_share * (self._elapsed_s + left_s):
            return self._best
        self._exploration_cost_s += cost_s
        self._trial_steps_left = steps - 1
        return kind

    def _optimism(self, kind: int) -> float:
        """Return the exploration bonus of a kind, relative to its rate."""
        return OPTIMISM / sqrt(1 + self._trials[kind])

    def observe(self, outcome: StepOutcome) -> None:
        """Update the acceptance of every position reached, and the corrections of the costs."""
        shape = outcome.shape
        if isinstance(shape, ProposedDepths):
            return
        assert not isinstance(shape, SequenceDepths), "the policy of ragged steps passes the shape"
        if shape is not None:
            self._learn_acceptance(shape, outcome)
        if shape not in self._options:
            return
        kind, previous = self._options.index(shape), self._last
        self._last = kind
        # Ignore the time of a step after a switch: the draft may ingest pending rows, and the
        # hardware caches may hold another model.
        if outcome.step_s and self._models[previous] == self._models[kind]:
            costs = self._costs.step_s(outcome.step_context)
            self._times_of(outcome.step_context.batch).learn(kind, outcome.step_s / costs[kind])

    def _learn_acceptance(self, shape: DraftShape, outcome: StepOutcome) -> None:
        default = [outcome.step_context.num_sampled > 0] * len(outcome.depths)
        kinds = default if outcome.sampled is None else outcome.sampled
        for sampled, acceptance in self._acceptance.items():
            rows = [b for b, kind in enumerate(kinds) if kind == sampled]
            if rows:
                acceptance.learn(
                    shape,
                    [outcome.depths[b] for b in rows],
                    [outcome.accepted[b] for b in rows],
                )

    def _catch_up_s(self, kind: int) -> float:
        """Return the seconds in which the draft model of this kind ingests its pending rows."""
        shape = self._options[kind]
        return 0.0 if shape is None else self._costs.catch_up_s(shape, self._step_context)

    def _tokens(self, step_context: StepContext) -> Sequence[float]:
        """Return the expected tokens per step and sequence of each kind."""
        share = step_context.num_sampled / step_context.batch
        if share in (0, 1):
            return self._acceptance[share == 1].tokens
        greedy, sampled = self._acceptance[False].tokens, self._acceptance[True].tokens
        return [(1 - share) * g + share * s for g, s in zip(greedy, sampled, strict=True)]

    def _rates(self, step_context: StepContext) -> list[float]:
        """Return the expected tokens per second and sequence of each kind; 0 if unavailable."""
        costs = self._costs.step_s(step_context)
        ratios = self._times_of(step_context.batch).ratios()
        tokens = self._tokens(step_context)
        return [e / (c * r) for e, c, r in zip(tokens, costs, ratios, strict=True)]

    def _times_of(self, batch: int) -> StepTimes:
        times = self._times.get(batch)
        if times is None:
            nearest = min(self._times, key=lambda timed: abs(timed - batch), default=None)
            before = None if nearest is None else self._times[nearest]
            times = self._times[batch] = StepTimes(self._models, before)
        return times


def _shape_phrase(shape: DraftShape | None) -> str:
    if shape is None:
        return "no draft"
    if shape.draft_top_k == 1:
        parts = "parts of a " if isinstance(shape, RaggedShape) else ""
        return f"{parts}chain of {shape.draft_depth}{by_model(shape)}"
    return f"tree of {shape_text(shape)}"
