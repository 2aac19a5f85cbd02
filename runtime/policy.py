"""How much to draft in the next step: a fixed shape, nothing, or what pays by measurement."""

from __future__ import annotations

from typing import Protocol

from specbuild.runtime.cost_table import CostTable
from specbuild.runtime.draft_tree import DraftTrees
from specbuild.runtime.manifest import DraftShape

# Pseudo-observations of the prior on each position's acceptance, and how fast they fade.
PRIOR_WEIGHT = 4.0
PRIOR_ACCEPTANCE = 0.6
FORGETTING = 0.97
# A longer chain must promise this much more before it replaces a shorter one.
MARGIN = 1.02
# How fast the table gives way to the times of the run's own steps, and how far one may pull it.
TIME_LEARNING = 0.05
LARGEST_RATIO = 3.0
PROBE_INTERVAL = 64
MAX_PROBE_INTERVAL = 512
FIRST_PLAIN_STEP = 8


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

    def shape(self, batch: int) -> DraftShape | None:
        """The shape for a step of ``batch`` sequences; None drafts nothing."""
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

    def shape(self, batch: int) -> DraftShape | None:
        """The fixed shape."""
        del batch
        return self._shape

    def observe(self, trees: DraftTrees, accepted: list[int], step_s: float | None) -> None:
        """Learns nothing."""


class MeasuredPolicy:
    """The chain with the most expected tokens a second, from costs and running acceptance.

    With p_i the chance that draft i is accepted once those before it were, a chain of d emits
    1 + Σ_{k=1…d} Π_{i≤k} p_i tokens a step. Costs are the table's, times the running ratio of
    the steps' own times to it (a longer context, a busier machine). Where no chain pays, nothing
    is drafted but a rare probe, rarer each time it fails; where one pays, a rare step without
    shows what it is measured against.
    """

    def __init__(self, table: CostTable, *, max_depth: int, table_origin: str) -> None:
        self.max_depth = max_depth
        self._deepest = min(max_depth, len(table.draft_s))
        self._table = table
        self._origin = table_origin
        self._accepted = [PRIOR_ACCEPTANCE * PRIOR_WEIGHT] * self._deepest
        self._trials = [PRIOR_WEIGHT] * self._deepest
        self._ratio = 1.0
        self._ratio_of: list[float | None] = [None] * (self._deepest + 1)
        self._timed_steps = [0] * (self._deepest + 1)
        self._drafted_steps = 0
        self._last_depth = 0
        self._idle_steps = 0
        self._probe_interval = PROBE_INTERVAL
        self._choice = 0
        self._costs: dict[int, list[float]] = {}

    @property
    def acceptance(self) -> list[float]:
        """The running estimate of p_1, p_2, …"""
        return [a / t for a, t in zip(self._accepted, self._trials, strict=True)]

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

    def shape(self, batch: int) -> DraftShape | None:
        """The best chain; now and then a chain although none pays."""
        rates = self._rates(batch)
        best = 0
        for depth in range(1, self._deepest + 1):
            if rates[depth] > rates[best] * MARGIN:
                best = depth
        self._choice = best
        if best == 0:
            self._idle_steps += 1
            if self._idle_steps < self._probe_interval:
                return None
            self._idle_steps = 0
            self._probe_interval = min(2 * self._probe_interval, MAX_PROBE_INTERVAL)
            best = max(range(1, self._deepest + 1), key=lambda depth: rates[depth])
        else:
            self._probe_interval = PROBE_INTERVAL
            self._drafted_steps += 1
            if self._drafted_steps % PROBE_INTERVAL == FIRST_PLAIN_STEP:
                return None
        return DraftShape(1, best, best)

    def observe(self, trees: DraftTrees, accepted: list[int], step_s: float | None) -> None:
        """Updates the estimate of every position that was reached, and the costs' ratios."""
        counts: list[int] = trees.count.tolist()
        for count, reached in zip(counts, accepted, strict=True):
            for i in range(min(reached + 1, count - 1, self._deepest)):
                self._accepted[i] = FORGETTING * self._accepted[i] + (i < reached)
                self._trials[i] = FORGETTING * self._trials[i] + 1
        depth, before = max(counts) - 1, self._last_depth
        self._last_depth = depth
        # After steps without it, a draft first takes up all their tokens: no time to learn from.
        if step_s is not None and depth <= self._deepest and not (depth > 0 and before == 0):
            self._learn_time(depth, step_s / self._table_costs(len(counts))[depth])

    def _learn_time(self, depth: int, ratio: float) -> None:
        ratio = min(ratio, LARGEST_RATIO)
        self._ratio += TIME_LEARNING * (ratio - self._ratio)
        self._timed_steps[depth] += 1
        own = self._ratio_of[depth]
        # A mean of the first few, then a running one.
        rate = max(TIME_LEARNING, 1 / self._timed_steps[depth])
        self._ratio_of[depth] = ratio if own is None else own + rate * (ratio - own)

    def _rates(self, batch: int) -> list[float]:
        """Expected tokens a second and sequence of each chain, 0 … the deepest measured."""
        costs = [
            cost * (self._ratio if own is None else own)
            for cost, own in zip(self._table_costs(batch), self._ratio_of, strict=True)
        ]
        expected, reach = 1.0, 1.0
        rates = [1.0 / costs[0]]
        for accepted, trials, cost in zip(self._accepted, self._trials, costs[1:], strict=True):
            reach *= accepted / trials
            expected += reach
            rates.append(expected / cost)
        return rates

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
