"""How much to draft in the next step: a fixed shape, nothing, or what pays by measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specbuild.runtime.draft.acceptance import (
    PRIOR_GREEDY,
    Acceptance,
    expected_tokens,
    prior_of,
    widened,
)
from specbuild.runtime.draft.costs import DraftCosts, Outlook, StepTimes
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest

# A longer chain must promise this much more before it replaces a shorter one; the first, and
# the time in which the draft takes up the tokens before it, must pay that much more.
MARGIN = 1.02
FIRST_MARGIN = 1.03
START_MARGIN = 1.5
# Steps without a draft before one is tried; doubles each time that leads to no lasting drafting.
PROBE_INTERVAL = 16
MAX_PROBE_INTERVAL = 128
LASTING_STEPS = 16
PROBE_SHARE = 0.01
# While drafting, every so many steps two go without a draft; the second is timed.
PLAIN_INTERVAL = 64
FIRST_PLAIN_STEP = 16


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What became of a step.

    Of the ``depths[b]`` levels of sequence b's draft that were verified ``accepted[b]`` were
    accepted. ``step_s`` is None where the time was not that of a whole step alone.
    """

    outlook: Outlook
    shape: DraftShape | None
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

    def shape(self, outlook: Outlook) -> DraftShape | None:
        """The shape for the next step; None drafts nothing."""
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

    def shape(self, outlook: Outlook) -> DraftShape | None:
        """The fixed shape."""
        del outlook
        return self._shape

    def observe(self, outcome: StepOutcome) -> None:
        """Learns nothing."""


def undrafted() -> FixedPolicy:
    """That of an engine without a draft."""
    return FixedPolicy(None, max_depth=0, reason="the engine has no draft")


def default_policy(manifest: Manifest, why: str) -> FixedPolicy:
    """The engine's default shape, no draft where it has none; ``why`` nothing was measured."""
    shape = manifest.draft_default
    if manifest.draft is None or shape is None:
        return undrafted()
    reason = f"the engine's default, for {why}"
    return FixedPolicy(shape, max_depth=shape.draft_depth, reason=reason)


class MeasuredPolicy:
    """The draft with the most expected tokens a second, from costs and running acceptance.

    With p_i the chance that level i is accepted once those before it were, a draft of d levels
    emits 1 + Σ_{k=1…d} Π_{i≤k} p_i tokens a step. Costs are the table's, times the running ratio
    of the steps' own times to it (other experts, a busier machine). Where no draft pays, nothing
    is drafted but a rare probe, rarer each time it fails; where one pays, rare steps without
    show what it is measured against.

    ``prior`` is p_1 of a chain as believed before the first step. All chains share what was seen
    of their positions. A tree has estimates of its own, and is believed to be a chain whose
    levels are wider until it was tried.
    """

    def __init__(
        self,
        costs: DraftCosts,
        *,
        prior: float = PRIOR_GREEDY,
        plain_interval: int = PLAIN_INTERVAL,
    ) -> None:
        shapes = costs.shapes
        self.max_depth = max((shape.draft_depth for shape in shapes), default=0)
        self._costs = costs
        self._options: tuple[DraftShape | None, ...] = (None, *shapes)
        self._number = {shape: number for number, shape in enumerate(self._options)}
        self._prior = prior
        chains = [shape.draft_depth for shape in shapes if shape.draft_top_k == 1]
        self._chains = Acceptance(max(chains, default=0))
        self._trees = {s: Acceptance(s.draft_depth) for s in shapes if s.draft_top_k > 1}
        self._plain_interval = plain_interval
        self._drafted_steps = 0
        self._last = 0
        self._idle_steps = 0
        self._probe_interval = PROBE_INTERVAL
        self._choice = 0
        self._outlook = Outlook(1, 0, 0)
        self._times: dict[int, StepTimes] = {}
        self._expected: list[float] | None = None

    @property
    def acceptance(self) -> list[float]:
        """The running estimate of a chain's p_1, p_2, …"""
        return self._chains.along(self._prior)

    @property
    def reason(self) -> str:
        """The last choice, with the numbers behind it."""
        rates, shape = self._rates(self._outlook), self._options[self._choice]
        chances = self.acceptance if shape is None else self._chances(shape)
        shown = " ".join(f"{p:.2f}" for p in chances[: 1 if shape is None else len(chances)])
        return (
            f"{_named(shape)}: {rates[self._choice]:.0f} tokens/s expected, {rates[0]:.0f} without "
            f"a draft; acceptance by position {shown}; costs {self._costs.origin}"
        )

    def shape(self, outlook: Outlook) -> DraftShape | None:
        """The best draft; now and then one although none pays."""
        self._outlook = outlook
        rates = self._rates(outlook)
        start_s = outlook.rows_behind * self._costs.row_s
        best = 0
        for option in range(1, len(rates)):
            if rates[option] > rates[best] * (MARGIN if best else FIRST_MARGIN):
                best = option
        saved_s = outlook.tokens_left * (1 / rates[0] - 1 / rates[best])
        if best == 0 or saved_s < START_MARGIN * start_s:
            self._stop_drafting()
            return self._probe(rates, start_s, outlook.tokens_left / rates[0])
        self._choice = best
        self._drafted_steps += 1
        plain = self._drafted_steps % self._plain_interval - FIRST_PLAIN_STEP
        return None if plain in (0, 1) else self._options[best]

    def _probe(self, rates: Sequence[float], start_s: float, left_s: float) -> DraftShape | None:
        """A draft, if one is due and its price is small against the time that is left."""
        self._idle_steps += 1
        if self._idle_steps < self._probe_interval:
            return None
        option = max(range(1, len(rates)), key=lambda i: rates[i], default=0)
        if option == 0 or rates[option] == 0 or start_s + 1 / rates[0] > PROBE_SHARE * left_s:
            return None
        self._idle_steps = 0
        self._probe_interval = min(2 * self._probe_interval, MAX_PROBE_INTERVAL)
        return self._options[option]

    def _stop_drafting(self) -> None:
        if self._choice and self._drafted_steps >= LASTING_STEPS:
            self._probe_interval = PROBE_INTERVAL
        self._choice = self._drafted_steps = 0

    def observe(self, outcome: StepOutcome) -> None:
        """Updates the estimate of every position that was reached, and the costs' ratios."""
        shape = outcome.shape
        if shape is not None:
            seen = self._chains if shape.draft_top_k == 1 else self._trees.get(shape)
            if seen is not None:
                seen.learn(outcome.depths, outcome.accepted)
                self._expected = None
        kind, before = self._number.get(shape), self._last
        if kind is None:
            return
        self._last = kind
        # Where drafting starts or stops, the draft takes up tokens or caches are cold: no time to
        # learn from.
        if outcome.step_s is not None and (kind > 0) == (before > 0):
            costs = self._costs.step_s(outcome.outlook)
            self._times_of(outcome.outlook.batch).learn(kind, outcome.step_s / costs[kind])

    def _rates(self, outlook: Outlook) -> list[float]:
        """Expected tokens a second and sequence with no draft, then with each; 0 where none is."""
        costs = self._costs.step_s(outlook)
        ratios = self._times_of(outlook.batch).ratios()
        if self._expected is None:
            self._expected = self._tokens_a_step()
        emitted = self._expected
        return [e / (c * r) for e, c, r in zip(emitted, costs, ratios, strict=True)]

    def _tokens_a_step(self) -> list[float]:
        """Tokens of a step and sequence with no draft, then with each."""
        by_depth = expected_tokens(self.acceptance)
        return [
            by_depth[0 if shape is None else shape.draft_depth]
            if shape is None or shape.draft_top_k == 1
            else expected_tokens(self._chances(shape))[-1]
            for shape in self._options
        ]

    def _chances(self, shape: DraftShape) -> list[float]:
        """p_1, p_2, … of a draft of this shape, to its last level."""
        depth, along = shape.draft_depth, self.acceptance
        if shape.draft_top_k == 1:
            return along[:depth]
        chain = [*along, *[along[-1] if along else self._prior] * depth][:depth]
        believed = (widened(chance, shape.draft_tokens / depth) for chance in chain)
        return self._trees[shape].against(believed)

    def _times_of(self, batch: int) -> StepTimes:
        times = self._times.get(batch)
        if times is None:
            times = self._times[batch] = StepTimes(len(self._options))
        return times


class LearnedPolicies:
    """Measured policies of an engine's runs: each starts from what the one before has learned.

    Greedy and sampled runs learn apart.
    """

    def __init__(self) -> None:
        self._by_kind: dict[bool, MeasuredPolicy] = {}
        self.last: MeasuredPolicy | None = None

    def next(
        self, costs: DraftCosts, *, sampled: bool, plain_interval: int = PLAIN_INTERVAL
    ) -> MeasuredPolicy:
        """The policy for one more run."""
        before = self._by_kind.get(sampled)
        learned = before.acceptance[0] if before is not None and before.acceptance else None
        policy = MeasuredPolicy(
            costs, prior=prior_of(sampled, learned), plain_interval=plain_interval
        )
        self._by_kind[sampled] = self.last = policy
        return policy


def _named(shape: DraftShape | None) -> str:
    if shape is None:
        return "no draft"
    if shape.draft_top_k == 1:
        return f"chain of {shape.draft_depth}"
    return f"tree of {shape.draft_top_k}x{shape.draft_depth}x{shape.draft_tokens}"
