"""How much to draft in the next step: a fixed shape, nothing, or what pays by measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Protocol, TypeAlias

from specbuild.runtime.draft.acceptance import PRIOR_GREEDY, acceptance_prior
from specbuild.runtime.draft.costs import DraftCosts, StepContext, StepTimes
from specbuild.runtime.draft.draft_models import by_model, shape_text
from specbuild.runtime.draft.host_proposal import ProposedDepths, WaitForTokens
from specbuild.runtime.draft.step_kinds import StepKinds
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest

# What a step drafts: a shape of the draft model's, chains of an offer, or nothing.
ChosenDraft: TypeAlias = DraftShape | ProposedDepths | None

# A longer chain must promise this much more before it replaces a shorter one; the first, and
# the time in which the draft takes up the tokens before it, must pay that much more.
MARGIN = 1.02
FIRST_MARGIN = 1.03
START_MARGIN = 1.5
# What exploring may cost: a share of the time, of which that of so many steps is lent.
EXPLORATION_SHARE = 0.02
CREDIT_STEPS = 64
# How much better a kind that was never tried may be than believed, how fast a try is forgotten,
# and what one counts for a chain that is a level longer or shorter.
OPTIMISM = 0.5
DECAY = 0.98
SIMILARITY = 0.8
# Times of a kind that make it known, and what starting or stopping to draft costs a plain step.
MIN_TIMED_STEPS = 3
SWITCH_COST = 0.1
# Steps in which another model is tried: it takes up what it missed once for all of them.
TRIAL_STEPS = 8


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What became of a step.

    Of the ``depths[b]`` levels of sequence b's draft that were verified ``accepted[b]`` were
    accepted. ``step_s`` is None where the time was not that of a whole step alone.
    """

    step_context: StepContext
    shape: ChosenDraft
    depths: Sequence[int]
    accepted: Sequence[int]
    step_s: float | None


class DraftPolicy(Protocol):
    """Chooses a shape before each step and is called with what became of it."""

    @property
    def max_depth(self) -> int:
        """The deepest tree that it may ask for; 0 for none."""
        ...

    @property
    def reason(self) -> str:
        """Why it chooses as it does now."""
        ...

    def shape(self, step_context: StepContext) -> ChosenDraft | WaitForTokens:
        """The shape for the next step; None drafts nothing.

        ``WAIT_FOR_TOKENS`` while tokens are in flight: start no step until they are known.
        """
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """One more step is through; later ones may have been chosen already."""
        ...


class FixedPolicy:
    """Always the same shape, or never a draft."""

    def __init__(self, shape: DraftShape | None, *, max_depth: int, reason: str) -> None:
        self._shape = shape
        self.max_depth = max_depth
        self.reason = reason

    def shape(self, step_context: StepContext) -> DraftShape | None:
        """The fixed shape."""
        del step_context
        return self._shape

    def observe(self, outcome: StepOutcome) -> None:
        """Learns nothing."""


def no_draft_policy() -> FixedPolicy:
    """That of an engine without a draft."""
    return FixedPolicy(None, max_depth=0, reason="the engine has no draft")


def default_policy(manifest: Manifest, why: str, *, shape: DraftShape | None = None) -> FixedPolicy:
    """The engine's default ``shape``, no draft where it has none; ``why`` nothing was measured."""
    shape = shape or manifest.draft_default
    if not manifest.drafters or shape is None:
        return no_draft_policy()
    reason = f"the engine's default, for {why}"
    return FixedPolicy(shape, max_depth=shape.draft_depth, reason=reason)


class MeasuredPolicy:
    """The draft with the most expected tokens a second, from costs and running acceptance.

    With p_i the chance that level i is accepted once those before it were, and t_k the time of a
    step of kind k (no draft, or one of the shapes), a draft of d levels gives tokens at the rate

        r_k = (1 + Σ_{j=1…d} Π_{i≤j} p_i) / t_k.

    The kind with the largest is taken, best. Another is explored in its place if it could be
    better,

        r_k · (1 + ½ / √(1 + n_k)) > r_best,    n_k = Σ 0.98^age over the tries of k,

    the most promising first, and if what exploring costs, Σ t_k − (tokens of k) / r_best, stays
    within a share of the time. A part of that is lent from the steps to come: so there is
    exploring in the first steps, and afterwards as much as the share pays for. The bound is that
    of discounted UCB (Garivier and Moulines, 2011), the budget that of conservative bandits (Wu
    and others, 2016).

    Several draft models compete alike: each has kinds of its own (step_kinds.py). Whoever starts to
    draft takes up what it missed, which must pay.

    ``prior`` is p_1 of a chain as believed before the first step, ``priors`` that of draft models
    by name. ``before`` is a policy over the same shapes whose times this one goes on with.
    ``explored_share`` of the time may go into exploring.
    """

    def __init__(
        self,
        costs: DraftCosts,
        *,
        prior: float = PRIOR_GREEDY,
        priors: Mapping[str, float] | None = None,
        before: MeasuredPolicy | None = None,
        exploration_share: float = EXPLORATION_SHARE,
    ) -> None:
        shapes = costs.shapes
        self.max_depth = max((shape.draft_depth for shape in shapes), default=0)
        self._costs = costs
        self._kinds = StepKinds(shapes, prior=prior, priors=priors or {})
        self._options, self._models = self._kinds.options, self._kinds.models
        self._exploration_share = exploration_share
        self._trials = [0.0] * len(self._options)
        self._elapsed_s = self._exploration_cost_s = 0.0
        self._last = self._requested = self._best = 0
        self._trial_steps_left = 0
        self._step_context = StepContext(1, 0, 0)
        self._times: dict[int, StepTimes] = {} if before is None else before._times

    @property
    def acceptance(self) -> list[float]:
        """The running estimate of a chain's p_1, p_2, …; of several models the first one's."""
        return next(iter(self.acceptance_by_model.values()))

    @property
    def acceptance_by_model(self) -> dict[str, list[float]]:
        """The same for each draft model; the only one of an engine has no name."""
        return self._kinds.acceptance

    @property
    def reason(self) -> str:
        """The last choice, with the numbers behind it."""
        rates, shape = self._rates(self._step_context), self._options[self._best]
        probabilities = self.acceptance[:1] if shape is None else self._kinds.probabilities(shape)
        shown = " ".join(f"{p:.2f}" for p in probabilities)
        return (
            f"{_described(shape)}: {rates[self._best]:.0f} tokens/s expected, {rates[0]:.0f} "
            f"without a draft; acceptance by position {shown}; costs {self._costs.origin}"
        )

    def best_rate(self, step_context: StepContext) -> float:
        """Expected tokens a second and sequence of the kind that pays; exploring left out."""
        self._step_context = step_context
        rates = self._rates(step_context)
        return rates[self._best_of(rates)]

    def time_ratio(self, batch: int) -> float:
        """What the costs of a step without a draft are to be multiplied with."""
        return self._times_of(batch).ratios()[0]

    def shape(self, step_context: StepContext) -> DraftShape | None:
        """The best draft, or one to explore."""
        self._step_context = step_context
        rates = self._rates(step_context)
        self._best = self._best_of(rates)
        if self._trial_steps_left and rates[self._requested] > 0:
            self._trial_steps_left -= 1
        else:
            self._trial_steps_left = 0
            self._requested = self._explore(rates)
        requested = self._requested
        self._elapsed_s += self._tokens[requested] / rates[requested]
        self._trials = [
            DECAY * n
            + (
                SIMILARITY ** abs(k - requested)
                if requested and self._same_model(requested, k)
                else k == requested
            )
            for k, n in enumerate(self._trials)
        ]
        return self._options[requested]

    def _same_model(self, before: int, kind: int) -> bool:
        """Whether a kind's model is that of the one ``before`` it: of both none, or the same."""
        return self._models[before] == self._models[kind]

    def _best_of(self, rates: Sequence[float]) -> int:
        """The kind that pays, also for the time in which the draft takes up what it missed."""
        leaders: dict[str | None, int] = {}
        for option in range(1, len(rates)):
            best = leaders.get(self._models[option], 0)
            if rates[option] > rates[best] * (MARGIN if best else FIRST_MARGIN):
                leaders[self._models[option]] = option
        if not leaders:
            return 0
        best = self._best_leader(list(leaders.values()), rates)
        saved_s = self._step_context.tokens_left * (1 / rates[0] - 1 / rates[best])
        return best if saved_s >= START_MARGIN * self._catch_up_s(best) else 0

    def _best_leader(self, leaders: Sequence[int], rates: Sequence[float]) -> int:
        """Of the best kinds of several models that of the best model, by what was seen for long.

        Two that are alike differ more by the luck of some steps than in truth.
        """
        if len(leaders) == 1:
            return leaders[0]

        def spent_s(kind: int) -> float:
            rate = rates[kind] * self._kinds.long_term_tokens(kind) / self._tokens[kind]
            left_s = self._step_context.tokens_left / rate + START_MARGIN * self._catch_up_s(kind)
            return left_s / (MARGIN if self._same_model(self._requested, kind) else 1.0)

        return min(leaders, key=spent_s)

    def _explore(self, rates: Sequence[float]) -> int:
        """The kind that promises most, where the budget pays for trying it; else the best."""
        potential = [
            rate * (1 + OPTIMISM / sqrt(1 + n)) for rate, n in zip(rates, self._trials, strict=True)
        ]
        potential[self._best] = rates[self._best]
        option = max(range(len(rates)), key=potential.__getitem__)
        if option == self._best:
            return option
        switches = not self._same_model(self._requested, option)
        # The first step of those that cross is no time to learn from.
        known = self._times_of(self._step_context.batch).timed(option) >= MIN_TIMED_STEPS
        steps = 2 if switches and not known else 1
        if self._best and not self._same_model(self._best, option) and self._catch_up_s(option):
            steps = TRIAL_STEPS
        tokens = self._tokens[option]
        cost_s = steps * max(tokens / rates[option] - tokens / rates[self._best], 0.0)
        if switches:
            cost_s += SWITCH_COST / rates[0]
        # Also where drafting goes on behind tokens that it has not seen.
        if switches or not self._same_model(self._best, option):
            cost_s += self._catch_up_s(option)
        left_s = min(self._step_context.tokens_left / rates[self._best], CREDIT_STEPS / rates[0])
        if self._exploration_cost_s + cost_s > self._exploration_share * (self._elapsed_s + left_s):
            return self._best
        self._exploration_cost_s += cost_s
        self._trial_steps_left = steps - 1
        return option

    def observe(self, outcome: StepOutcome) -> None:
        """Updates the estimate of every position that was reached, and the costs' ratios."""
        shape = outcome.shape
        if isinstance(shape, ProposedDepths):
            return
        if shape is not None:
            self._kinds.learn(shape, outcome.depths, outcome.accepted)
        kind, before = self._kinds.number(shape), self._last
        if kind is None:
            return
        self._last = kind
        # Where drafting starts or stops, the draft takes up tokens or caches are cold: no time to
        # learn from.
        if outcome.step_s and self._same_model(before, kind):
            costs = self._costs.step_s(outcome.step_context)
            self._times_of(outcome.step_context.batch).learn(kind, outcome.step_s / costs[kind])

    def _catch_up_s(self, kind: int) -> float:
        """Time in which the draft of this kind takes up what it has not seen."""
        shape = self._options[kind]
        return 0.0 if shape is None else self._costs.catch_up_s(shape, self._step_context)

    @property
    def _tokens(self) -> list[float]:
        """Tokens of a step and sequence that are expected of each kind."""
        return self._kinds.tokens

    def _rates(self, step_context: StepContext) -> list[float]:
        """Expected tokens a second and sequence of each kind; 0 where there is none."""
        costs = self._costs.step_s(step_context)
        ratios = self._times_of(step_context.batch).ratios()
        return [e / (c * r) for e, c, r in zip(self._tokens, costs, ratios, strict=True)]

    def _times_of(self, batch: int) -> StepTimes:
        times = self._times.get(batch)
        if times is None:
            nearest = min(self._times, key=lambda known: abs(known - batch), default=None)
            before = None if nearest is None else self._times[nearest]
            times = self._times[batch] = StepTimes(self._models, before)
        return times


class LearnedPolicies:
    """Measured policies of an engine's runs: each starts from what the one before has learned.

    Drafters learn apart, and so do kinds of steps: greedy or sampled, with full logits or without.
    """

    def __init__(self, exploration_share: float = EXPLORATION_SHARE) -> None:
        self._exploration_share = exploration_share
        self._by_kind: dict[tuple[str, bool, bool], MeasuredPolicy] = {}
        self.last: MeasuredPolicy | None = None

    def next(
        self, costs: DraftCosts, *, sampled: bool, full_logits: bool = False, drafter: str = ""
    ) -> MeasuredPolicy:
        """The policy for one more run with a drafter of this name."""
        kind = (drafter, sampled, full_logits)
        before = self._by_kind.get(kind)
        learned = {} if before is None else before.acceptance_by_model
        policy = MeasuredPolicy(
            costs,
            prior=acceptance_prior(sampled),
            priors={
                m: acceptance_prior(sampled, chain[0]) for m, chain in learned.items() if chain
            },
            before=before,
            exploration_share=self._exploration_share,
        )
        self._by_kind[kind] = self.last = policy
        return policy


def _described(shape: DraftShape | None) -> str:
    if shape is None:
        return "no draft"
    if shape.draft_top_k == 1:
        return f"chain of {shape.draft_depth}{by_model(shape)}"
    return f"tree of {shape_text(shape)}"
