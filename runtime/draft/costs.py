"""What a step costs with each draft: where it comes from, and how a run's own times correct it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.engine_dir.manifest import DraftShape

# How fast a table gives way to the times of the run's own steps, how many of them it counts for,
# and how far one may pull it.
TIME_LEARNING = 0.05
TABLE_WEIGHT = 3
LARGEST_RATIO = 3.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known before a step.

    ``tokens_left`` is how much the longest of the ``batch`` sequences may still emit;
    ``rows_behind`` how many committed tokens the draft would have to take up first; ``context``
    how many tokens a sequence has, on average. ``sampled``: a sequence has a temperature above 0;
    ``full_logits``: one has top-k or top-p.
    """

    batch: int
    tokens_left: int
    rows_behind: int
    context: int = 0
    sampled: bool = False
    full_logits: bool = False


class DraftCosts(Protocol):
    """The drafts that a step may have, and what it costs with each."""

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """Every draft that can be asked for: chains by depth, then trees."""
        ...

    @property
    def row_s(self) -> float:
        """Time in which the draft takes up one token that it has not seen."""
        ...

    @property
    def origin(self) -> str:
        """Where the costs come from."""
        ...

    def step_s(self, outlook: Outlook) -> Sequence[float]:
        """Seconds of a step without a draft, then with each of ``shapes``.

        Infinite where there is no such step for so many sequences.
        """
        ...


class ChainCosts:
    """Chains up to ``max_depth``, by a table of target steps and what chains add to them."""

    def __init__(self, table: CostTable, *, max_depth: int, origin: str) -> None:
        deepest = min(max_depth, len(table.draft_s))
        self.shapes = tuple(DraftShape(1, depth, depth) for depth in range(1, deepest + 1))
        self.row_s = table.row_s
        self.origin = origin
        self._table = table
        self._known: dict[int, list[float]] = {}

    def step_s(self, outlook: Outlook) -> Sequence[float]:
        """Drafting a batch reads the draft's weights once, as one sequence does."""
        batch = outlook.batch
        costs = self._known.get(batch)
        if costs is None:
            costs = self._known[batch] = [
                self._table.step_s(batch * (depth + 1)) + self._table.chain_s(depth)
                for depth in range(len(self.shapes) + 1)
            ]
        return costs


class StepTimes:
    """The run's own times of each kind of step, as ratios to a table's."""

    def __init__(self, kinds: int) -> None:
        self._all = 1.0
        self._own: list[float | None] = [None] * kinds
        self._seen = [0] * kinds
        self._steps = 0

    def ratios(self) -> list[float]:
        """What the table's times are to be multiplied with."""
        return [self._all if own is None else own for own in self._own]

    def learn(self, kind: int, ratio: float) -> None:
        """One more step was timed."""
        ratio, before = min(ratio, LARGEST_RATIO), self._own[kind]
        self._steps += 1
        self._seen[kind] += 1
        before = self._all if before is None else before
        self._own[kind] = before + _rate(self._seen[kind]) * (ratio - before)
        self._all += _rate(self._steps) * (ratio - self._all)


def _rate(steps: int) -> float:
    """Weight of the newest step: first that of a mean, later that of a running one."""
    return max(TIME_LEARNING, 1 / (TABLE_WEIGHT + steps))
