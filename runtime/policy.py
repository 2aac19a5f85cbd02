"""How much to draft in the next step: a fixed shape, nothing, or what pays by measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specbuild.runtime.cost_table import CostTable
from specbuild.runtime.draft_tree import DraftTrees
from specbuild.runtime.manifest import DraftShape

# Pseudo-observations of what is believed of a position, and how fast real ones fade.
PRIOR_WEIGHT = 4.0
FORGETTING = 0.97
# A sampled token is a draft's likeliest one less often than a greedy one.
PRIOR_GREEDY = 0.6
PRIOR_SAMPLED = 0.4
# A longer chain must promise this much more before it replaces a shorter one; the first, and
# the time in which the draft takes up the tokens before it, must pay that much more.
MARGIN = 1.02
FIRST_MARGIN = 1.03
START_MARGIN = 1.5
# How fast the table gives way to the times of the run's own steps, how many of them it counts
# for, and how far one may pull it.
TIME_LEARNING = 0.05
TABLE_WEIGHT = 3
LARGEST_RATIO = 3.0
# Steps without a draft before one is tried; doubles each time that leads to no lasting drafting.
PROBE_INTERVAL = 16
MAX_PROBE_INTERVAL = 128
LASTING_STEPS = 16
PROBE_SHARE = 0.01
# While drafting, every so many steps two go without a draft; the second is timed.
PLAIN_INTERVAL = 64
FIRST_PLAIN_STEP = 16


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known before a step.

    ``tokens_left`` is how much the longest of the ``batch`` sequences may still emit;
    ``rows_behind`` how many committed tokens the draft would have to take up first.
    """

    batch: int
    tokens_left: int
    rows_behind: int


class DraftPolicy(Protocol):
    """Chooses a shape before each step and hears what became of it."""

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

    def observe(self, trees: DraftTrees, accepted: list[int], step_s: float | None) -> None:
        """What was verified, how many drafts each sequence accepted, and the step's time.

        The time is None where the step also had to take up a prompt.
        """
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

    def observe(self, trees: DraftTrees, accepted: list[int], step_s: float | None) -> None:
        """Learns nothing."""


class _Times:
    """The run's own step times of each chain, as ratios to the table's."""

    def __init__(self, depths: int) -> None:
        self._all = 1.0
        self._own: list[float | None] = [None] * depths
        self._seen = [0] * depths
        self._steps = 0

    def ratio(self, depth: int) -> float:
        """What the table's time is to be multiplied with."""
        own = self._own[depth]
        return self._all if own is None else own

    def learn(self, depth: int, ratio: float) -> None:
        """One more step was timed."""
        ratio, before = min(ratio, LARGEST_RATIO), self.ratio(depth)
        self._steps += 1
        self._seen[depth] += 1
        self._all += _rate(self._steps) * (ratio - self._all)
        self._own[depth] = before + _rate(self._seen[depth]) * (ratio - before)


def _rate(steps: int) -> float:
    """Weight of the newest step: first that of a mean, later that of a running one."""
    return max(TIME_LEARNING, 1 / (TABLE_WEIGHT + steps))


class MeasuredPolicy:
    """The chain with the most expected tokens a second, from costs and running acceptance.

    With p_i the chance that draft i is accepted once those before it were, a chain of d emits
    1 + Σ_{k=1…d} Π_{i≤k} p_i tokens a step. Costs are the table's, times the running ratio of
    the steps' own times to it (a longer context, a busier machine). Where no chain pays, nothing
    is drafted but a rare probe, rarer each time it fails; where one pays, rare steps without
    show what it is measured against.

    ``prior`` is p_1 as believed before the first step. A later position is believed to be like
    the one before it until it was tried: acceptance hardly falls along a chain, and a position
    that no chain reaches would otherwise never be tried.
    """

    def __init__(
        self,
        table: CostTable,
        *,
        max_depth: int,
        table_origin: str,
        prior: float = PRIOR_GREEDY,
    ) -> None:
        self.max_depth = max_depth
        self._deepest = min(max_depth, len(table.draft_s))
        self._table = table
        self._origin = table_origin
        self._prior = prior
        self._accepted = [0.0] * self._deepest
        self._trials = [0.0] * self._deepest
        self._drafted_steps = 0
        self._last_depth = 0
        self._idle_steps = 0
        self._probe_interval = PROBE_INTERVAL
        self._choice = 0
        self._costs: dict[int, list[float]] = {}
        self._times: dict[int, _Times] = {}

    @property
    def acceptance(self) -> list[float]:
        """The running estimate of p_1, p_2, …"""
        estimates, believed = [], self._prior
        for accepted, trials in zip(self._accepted, self._trials, strict=True):
            believed = (accepted + PRIOR_WEIGHT * believed) / (trials + PRIOR_WEIGHT)
            estimates.append(believed)
        return estimates

    @property
    def reason(self) -> str:
        """The last choice, with the numbers behind it."""
        rates = self._rates(1)
        shown = " ".join(f"{p:.2f}" for p in self.acceptance[: max(self._choice, 1)])
        return (
            f"chain of {self._choice}: {rates[self._choice]:.0f} tokens/s expected, "
            f"{rates[0]:.0f} without a draft; acceptance by position {shown}; costs "
            f"{self._origin}"
        )

    def shape(self, outlook: Outlook) -> DraftShape | None:
        """The best chain; now and then a chain although none pays."""
        rates = self._rates(outlook.batch)
        start_s = outlook.rows_behind * self._table.row_s
        best = 0
        for depth in range(1, self._deepest + 1):
            if rates[depth] > rates[best] * (MARGIN if best else FIRST_MARGIN):
                best = depth
        saved_s = outlook.tokens_left * (1 / rates[0] - 1 / rates[best])
        if best == 0 or saved_s < START_MARGIN * start_s:
            self._stop_drafting()
            return self._probe(rates, start_s, outlook.tokens_left / rates[0])
        self._choice = best
        self._drafted_steps += 1
        if self._drafted_steps % PLAIN_INTERVAL in (FIRST_PLAIN_STEP, FIRST_PLAIN_STEP + 1):
            return None
        return DraftShape(1, best, best)

    def _probe(self, rates: Sequence[float], start_s: float, left_s: float) -> DraftShape | None:
        """A chain, if one is due and its price is small against the time that is left."""
        self._idle_steps += 1
        if self._idle_steps < self._probe_interval:
            return None
        depth = max(range(1, self._deepest + 1), key=lambda d: rates[d])
        if start_s + 1 / rates[0] > PROBE_SHARE * left_s:
            return None
        self._idle_steps = 0
        self._probe_interval = min(2 * self._probe_interval, MAX_PROBE_INTERVAL)
        return DraftShape(1, depth, depth)

    def _stop_drafting(self) -> None:
        if self._choice and self._drafted_steps >= LASTING_STEPS:
            self._probe_interval = PROBE_INTERVAL
        self._choice = self._drafted_steps = 0

    def observe(self, trees: DraftTrees, accepted: list[int], step_s: float | None) -> None:
        """Updates the estimate of every position that was reached, and the costs' ratios."""
        counts: list[int] = trees.count.tolist()
        for count, reached in zip(counts, accepted, strict=True):
            for i in range(min(reached + 1, count - 1, self._deepest)):
                self._accepted[i] = FORGETTING * self._accepted[i] + (i < reached)
                self._trials[i] = FORGETTING * self._trials[i] + 1
        depth, before = max(counts) - 1, self._last_depth
        self._last_depth = depth
        # Where drafting starts or stops, the draft takes up tokens or caches are cold: no time to
        # learn from.
        if step_s is not None and depth <= self._deepest and (depth > 0) == (before > 0):
            batch = len(counts)
            self._times_of(batch).learn(depth, step_s / self._table_costs(batch)[depth])

    def _rates(self, batch: int) -> list[float]:
        """Expected tokens a second and sequence of each chain, 0 … the deepest measured."""
        times = self._times_of(batch)
        costs = [cost * times.ratio(d) for d, cost in enumerate(self._table_costs(batch))]
        expected, reach = 1.0, 1.0
        rates = [1.0 / costs[0]]
        for chance, cost in zip(self.acceptance, costs[1:], strict=True):
            reach *= chance
            expected += reach
            rates.append(expected / cost)
        return rates

    def _times_of(self, batch: int) -> _Times:
        times = self._times.get(batch)
        if times is None:
            times = self._times[batch] = _Times(self._deepest + 1)
        return times

    def _table_costs(self, batch: int) -> list[float]:
        """Seconds of a step of each chain by the table."""
        costs = self._costs.get(batch)
        if costs is None:
            # Drafting a batch reads the draft's weights once, as one sequence does.
            costs = self._costs[batch] = [
                self._table.step_s(batch * (depth + 1)) + self._table.chain_s(depth)
                for depth in range(self._deepest + 1)
            ]
        return costs


def prior_of(sampled: bool, learned: float | None = None) -> float:
    """What a run may believe of acceptance: half experience of an earlier one, half the general."""
    general = PRIOR_SAMPLED if sampled else PRIOR_GREEDY
    return general if learned is None else (general + learned) / 2
