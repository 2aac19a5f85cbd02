"""Takes what the host offers where it expects more tokens a second than the best draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import merge
from math import exp, log

from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.draft.costs import LARGEST_STEP, Outlook
from specbuild.runtime.draft.offer import OfferedDepths
from specbuild.runtime.draft.policy import ChosenDraft, MeasuredPolicy, StepOutcome

# An offer must promise this much more than the model's best draft, or than none.
OFFER_MARGIN = 1.02
# How fast the times of steps with an offer follow the newest, and fall back to the table's.
TIME_RATE = 0.1
FADING = 0.995


class OfferTimes:
    """Seconds of a step with an offer, by its rows: the table's, corrected by a run's own."""

    def __init__(self, table: CostTable, most_rows: int) -> None:
        self._step_s = [0.0, *(table.step_s(rows) for rows in range(1, most_rows + 1))]
        self._own = [0.0] * (most_rows.bit_length() + 1)

    def step_s(self, rows: int) -> float:
        """Of so many rows, on a machine as the table knows it."""
        return self._step_s[rows] * exp(self._own[rows.bit_length()])

    def learn(self, rows: int, ratio: float) -> None:
        """A step of so many rows took ``ratio`` of the table's time."""
        kind = rows.bit_length()
        self._own = [FADING * own for own in self._own]
        apart = log(ratio) - self._own[kind]
        self._own[kind] += TIME_RATE * min(max(apart, -LARGEST_STEP), LARGEST_STEP)

    def table_s(self, rows: int) -> float:
        """The table's time alone."""
        return self._step_s[rows]


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


class OfferPolicy:
    """The offer of a step, or what ``model`` would choose, whichever expects more.

    The offer's rate is that of the tokens that its chances promise, over the time of a target step
    of its rows; the model's is that of its policy. ``most_depth`` bounds what is ever offered.
    """

    def __init__(self, model: MeasuredPolicy, times: OfferTimes, *, most_depth: int) -> None:
        self._model = model
        self._times = times
        self.max_depth = max(model.max_depth, most_depth)
        self._steps = self._offered = 0
        self._after_offer = False

    @property
    def reason(self) -> str:
        """How often an offer was taken, and what the model's policy last chose."""
        share = 100 * self._offered / max(self._steps, 1)
        return f"suffixes in {share:.0f} % of steps; else {self._model.reason}"

    def shape(self, outlook: Outlook) -> ChosenDraft:
        """The offer as far as it pays, else the model's choice."""
        self._steps += 1
        if any(outlook.reach):
            depths, rate = best_depths(outlook.reach, self._times)
            rate /= outlook.batch * self._model.time_ratio(outlook.batch)
            if any(depths) and rate > OFFER_MARGIN * self._model.best_rate(outlook):
                self._offered += 1
                return OfferedDepths(depths)
        return self._model.shape(outlook)

    def observe(self, outcome: StepOutcome) -> None:
        """The model's policy learns of its own steps, the times of those with an offer."""
        after_offer, shape = self._after_offer, outcome.shape
        self._after_offer = isinstance(shape, OfferedDepths)
        if not isinstance(shape, OfferedDepths):
            # Behind an offer a draft model takes up what the offer gave: no usual time.
            unusual = after_offer and shape is not None
            self._model.observe(replace(outcome, step_s=None) if unusual else outcome)
        elif outcome.step_s:
            batch = outcome.outlook.batch
            rows = batch + sum(outcome.depths)
            table_s = self._times.table_s(rows) * self._model.time_ratio(batch)
            self._times.learn(rows, outcome.step_s / table_s)
