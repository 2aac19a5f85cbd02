"""Takes what the host offers where it expects more tokens a second than the best draft model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from heapq import merge
from math import exp, log
from typing import Protocol

from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.draft.costs import LARGEST_STEP, Outlook
from specbuild.runtime.draft.offer import LATER, Later, OfferedDepths
from specbuild.runtime.draft.policy import ChosenDraft, DraftPolicy, MeasuredPolicy, StepOutcome

# An offer must promise this much more than the model's best draft, or than none.
OFFER_MARGIN = 1.02
# How fast the times of steps with an offer follow the newest, and fall back to the table's.
TIME_RATE = 0.1
FADING = 0.995
# How fast the distance of offers follows the newest.
BETWEEN_RATE = 0.2


class OfferCosts(Protocol):
    """What steps with an offer cost.

    ``ratio`` is what the times of steps without a draft are to be multiplied with on this machine.
    """

    def best(self, outlook: Outlook, ratio: float) -> tuple[tuple[int, ...], float]:
        """How much of each chain to verify, and the tokens a second and sequence."""
        ...

    def learn(self, outcome: StepOutcome, ratio: float) -> None:
        """A step with an offer is through, and was timed."""
        ...


class OfferTimes:
    """Seconds of a step with an offer, by its rows: the table's, corrected by a run's own."""

    def __init__(self, table: CostTable, most_rows: int) -> None:
        self._step_s = [0.0, *(table.step_s(rows) for rows in range(1, most_rows + 1))]
        self._own = [0.0] * (most_rows.bit_length() + 1)

    def step_s(self, rows: int) -> float:
        """Of so many rows, on a machine as the table knows it."""
        return self._step_s[rows] * exp(self._own[rows.bit_length()])

    def best(self, outlook: Outlook, ratio: float) -> tuple[tuple[int, ...], float]:
        """See :class:`OfferCosts`."""
        depths, rate = best_depths(outlook.reach, self)
        return depths, rate / (outlook.batch * ratio)

    def learn(self, outcome: StepOutcome, ratio: float) -> None:
        """See :class:`OfferCosts`."""
        assert outcome.step_s
        rows = outcome.outlook.batch + sum(outcome.depths)
        kind = rows.bit_length()
        self._own = [FADING * own for own in self._own]
        apart = log(outcome.step_s / (self._step_s[rows] * ratio)) - self._own[kind]
        self._own[kind] += TIME_RATE * min(max(apart, -LARGEST_STEP), LARGEST_STEP)


def best_depths(
    reach: Sequence[Sequence[float]], times: OfferTimes
) -> tuple[tuple[int, ...], float]:
    """How much of each chain to verify, and the tokens a second of all together.

    Of all sequences' tokens those with the largest chances are taken, as many as give the most
    expected tokens, 1 for each sequence and the chances, over the time of so many rows.
    """
    batch = len(reach)
    nodes = merge(*([(-p, b) for p in chain] for b, chain in enumerate(reach)))
    expected, taken = float(batch), [0] * batch
    best_rate, best = expected / times.step_s(batch), tuple(taken)
    for rows, (negated, b) in enumerate(nodes, start=batch + 1):
        expected -= negated
        taken[b] += 1
        rate = expected / times.step_s(rows)
        if rate > best_rate:
            best_rate, best = rate, tuple(taken)
    return best, best_rate


class _OffersFirst(ABC):
    """The offer of a step where it pays, or what ``model`` would choose.

    Where tokens are in flight a step with an offer must wait for them. It does so where what
    is offered behind them pays, and behind a step with an offer, which repeats more often than not.
    """

    def __init__(self, model: DraftPolicy, *, most_depth: int) -> None:
        self._chooser = model
        self.max_depth = max(model.max_depth, most_depth)
        self._steps = self._offered = 0
        self._chose_offer = False

    @property
    def reason(self) -> str:
        """How often an offer was taken, and what the model's policy last chose."""
        share = 100 * self._offered / max(self._steps, 1)
        return f"suffixes in {share:.0f} % of steps; else {self._chooser.reason}"

    def shape(self, outlook: Outlook) -> ChosenDraft | Later:
        """The offer as far as it pays, else the model's choice."""
        if outlook.ahead and self._chose_offer:
            return LATER
        depths = self._paying(outlook) if any(outlook.reach) else None
        if depths is not None and outlook.ahead:
            return LATER
        self._steps += 1
        self._chose_offer = depths is not None
        if depths is None:
            return self._model_shape(outlook)
        self._offered += 1
        return OfferedDepths(depths)

    def _model_shape(self, outlook: Outlook) -> ChosenDraft | Later:
        return self._chooser.shape(outlook)

    @abstractmethod
    def _paying(self, outlook: Outlook) -> tuple[int, ...] | None:
        """How much of each chain to verify, None where the model's choice expects more."""


class UnmeasuredOffers(_OffersFirst):
    """Where no costs were measured: an offer that expects more than the model's draft can give.

    Without a model that is one token more than without an offer.
    """

    def _paying(self, outlook: Outlook) -> tuple[int, ...] | None:
        expected = sum(map(sum, outlook.reach))
        pays = expected >= outlook.batch * (1 + self._chooser.max_depth)
        return tuple(map(len, outlook.reach)) if pays else None

    def observe(self, outcome: StepOutcome) -> None:
        """Learns nothing."""


class OfferPolicy(_OffersFirst):
    """The offer of a step, or what ``model`` would choose, whichever expects more.

    The offer's rate is that of the tokens that its chances promise, over the time of a step that
    verifies them; the model's is that of its policy. ``most_depth`` bounds what is ever offered.

    The model is asked as if the output ended with the next offer, by how far apart offers were so
    far: what it costs to start drafting, and to try shapes, must be earned until then.
    """

    def __init__(self, model: MeasuredPolicy, costs: OfferCosts, *, most_depth: int) -> None:
        super().__init__(model, most_depth=most_depth)
        self._model = model
        self._costs = costs
        self._after_offer = False
        self._between: float | None = None
        self._since_offer = 0.0

    def _paying(self, outlook: Outlook) -> tuple[int, ...] | None:
        depths, rate = self._costs.best(outlook, self._model.time_ratio(outlook.batch))
        pays = any(depths) and rate > OFFER_MARGIN * self._model.best_rate(self._until(outlook))
        return depths if pays else None

    def _model_shape(self, outlook: Outlook) -> ChosenDraft | Later:
        return self._model.shape(self._until(outlook))

    def _until(self, outlook: Outlook) -> Outlook:
        """What is known before a step, with the tokens up to the next offer for those left."""
        if self._between is None:
            return outlook
        expected = max(round(self._between - self._since_offer), 1)
        return replace(outlook, tokens_left=min(outlook.tokens_left, expected))

    def _count(self, outcome: StepOutcome) -> None:
        """Learns how many tokens lie between two offers that are taken."""
        if isinstance(outcome.shape, OfferedDepths):
            between = self._since_offer
            if between and self._between is not None:
                between = self._between + BETWEEN_RATE * (between - self._between)
            self._between = between or self._between
            self._since_offer = 0.0
        elif outcome.accepted:
            self._since_offer += 1 + sum(outcome.accepted) / len(outcome.accepted)

    def observe(self, outcome: StepOutcome) -> None:
        """The model's policy learns of its own steps, the times of those with an offer."""
        self._count(outcome)
        after_offer, shape = self._after_offer, outcome.shape
        self._after_offer = isinstance(shape, OfferedDepths)
        if not isinstance(shape, OfferedDepths):
            # Behind an offer a draft model takes up what the offer gave: no usual time.
            unusual = after_offer and shape is not None
            self._model.observe(replace(outcome, step_s=None) if unusual else outcome)
        elif outcome.step_s:
            self._costs.learn(outcome, self._model.time_ratio(outcome.outlook.batch))
