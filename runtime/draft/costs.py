"""What a step costs with each draft: where it comes from, and how a run's own times correct it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Protocol

from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.draft.draft_models import ModelShape, model_of
from specbuild.runtime.engine_dir.manifest import DraftShape

# How fast the level of all times follows the newest, how fast a kind's own ratio does once it is
# known, how fast that is forgotten, and how far one time may pull: what disturbs a step makes it
# longer by any amount.
LEVEL_RATE = 0.2
KIND_RATE = 0.05
DECAY = 0.99
MAX_CORRECTION = log(1.5)


@dataclass(frozen=True, slots=True)
class StepContext:
    """What is known before a step.

    ``tokens_left`` is how much the longest of the ``batch`` sequences may still emit;
    ``rows_behind`` how many committed tokens the draft would have to take up first, of several the
    first one, ``others_behind`` the others; ``context`` how many tokens a sequence has, on average.
    ``sampled``: a sequence has a temperature above 0; ``full_logits``: one has top-k or
    top-p. ``reach[b]`` are the chances of the tokens that the host offers for sequence b
    (offer.py), none where it offers nothing. ``ahead``: tokens of some are in flight; ``reach`` is
    then of the tokens behind the most that these can be.
    """

    batch: int
    tokens_left: int
    pending_rows: int
    context: int = 0
    sampled: bool = False
    full_logits: bool = False
    cumulative_probs: tuple[tuple[float, ...], ...] = ()
    has_unread_tokens: bool = False
    other_pending_rows: tuple[int, ...] = ()


class DraftCosts(Protocol):
    """The drafts that a step may have, and what it costs with each."""

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """Every draft that can be asked for: chains by depth, then trees."""
        ...

    def catch_up_s(self, shape: DraftShape, step_context: StepContext) -> float:
        """Time in which the draft of this shape takes up what it has not seen."""
        ...

    @property
    def origin(self) -> str:
        """Where the costs come from."""
        ...

    def step_s(self, step_context: StepContext) -> Sequence[float]:
        """Seconds of a step without a draft, then with each of ``shapes``.

        Infinite where there is no such step for so many sequences.
        """
        ...


class ChainCosts:
    """Chains up to ``max_depth``, by a table of target steps and what chains add to them."""

    def __init__(self, table: CostTable, *, max_depth: int, origin: str) -> None:
        deepest = min(max_depth, len(table.draft_s))
        self.shapes = tuple(DraftShape(1, depth, depth) for depth in range(1, deepest + 1))
        self.origin = origin
        self._table = table
        self._known: dict[int, list[float]] = {}

    def step_s(self, step_context: StepContext) -> Sequence[float]:
        """Drafting a batch reads the draft's weights once, as one sequence does."""
        batch = step_context.batch
        costs = self._known.get(batch)
        if costs is None:
            costs = self._known[batch] = [
                self._table.step_s(batch * (depth + 1)) + self._table.chain_s(depth)
                for depth in range(len(self.shapes) + 1)
            ]
        return costs

    def catch_up_s(self, shape: DraftShape, step_context: StepContext) -> float:  # noqa: ARG002
        """Row by row."""
        return step_context.pending_rows * self._table.row_s


class ChainsByModel:
    """Chains of several draft models, by the kind of each: its table, and its deepest chain.

    What a chain adds to a step is a difference of times that were taken side by side, while tables
    may be of a calm and of a busy minute. So all stand on one table's target steps, the longest's.
    """

    def __init__(self, tables: Mapping[str, tuple[CostTable, int]], *, origin: str) -> None:
        longest = max((table for table, _ in tables.values()), key=lambda t: t.target_rows[-1])
        self.origin = origin
        self._chains = {
            kind: ChainCosts(
                replace(table, target_rows=longest.target_rows, target_s=longest.target_s),
                max_depth=depth,
                origin=origin,
            )
            for kind, (table, depth) in tables.items()
        }
        self.shapes: tuple[DraftShape, ...] = tuple(
            ModelShape(s.draft_top_k, s.draft_depth, s.draft_tokens, kind)
            for kind, chains in self._chains.items()
            for s in chains.shapes
        )

    def step_s(self, step_context: StepContext) -> Sequence[float]:
        """See :class:`DraftCosts`."""
        by_model = [chains.step_s(step_context) for chains in self._chains.values()]
        return [by_model[0][0], *(step_s for times in by_model for step_s in times[1:])]

    def catch_up_s(self, shape: DraftShape, step_context: StepContext) -> float:
        """See :class:`DraftCosts`."""
        kind = model_of(shape)
        place = [*self._chains].index(kind)
        behind = (step_context.pending_rows, *step_context.other_pending_rows, *[0] * place)[place]
        return self._chains[kind].catch_up_s(shape, replace(step_context, pending_rows=behind))


class StepTimes:
    """What a run's own steps say of a table: time_k = table_k · exp(level + own_k).

    The level is that of the machine now, and moves all kinds; own_k is what is wrong with the
    table's entry for kind k. Each timed step moves both towards what it took. Kind 0 is a step
    without a draft; another that was never timed is believed to be like the nearest that was and
    drafts by the same model: ``models`` has that of each kind.
    """

    def __init__(self, models: Sequence[str | None], before: StepTimes | None = None) -> None:
        kinds = len(models)
        self._models = models
        self._level: float = 0.0 if before is None else before._level
        self._corrections: list[float] = (
            [0.0] * kinds if before is None else list(before._corrections)
        )
        self._timed_steps: list[float] = (
            [0.0] * kinds if before is None else list(before._timed_steps)
        )
        self._steps = 0
        self._ratios: list[float] | None = None

    def ratios(self) -> list[float]:
        """What the table's times are to be multiplied with."""
        if self._ratios is None:
            similar = map(self._similar_kind, range(len(self._corrections)))
            self._ratios = [exp(self._level + self._corrections[kind]) for kind in similar]
        return self._ratios

    def timed(self, kind: int) -> float:
        """Steps of a kind that were timed, the older for less."""
        return self._timed_steps[kind]

    def learn(self, kind: int, ratio: float) -> None:
        """One more step was timed: ``ratio`` is its time over the table's."""
        correction = self._corrections[self._similar_kind(kind)]
        error = log(ratio) - self._level - correction
        error = min(max(error, -MAX_CORRECTION), MAX_CORRECTION)
        self._steps += 1
        self._timed_steps = [DECAY * n for n in self._timed_steps]
        self._timed_steps[kind] += 1
        to_level = max(LEVEL_RATE, 1 / self._steps)
        to_own = (1 - to_level) * max(KIND_RATE, 1 / (1 + self._timed_steps[kind]))
        self._level += to_level * error
        self._corrections[kind] = correction + to_own * error
        self._ratios = None

    def _similar_kind(self, kind: int) -> int:
        """The kind whose own ratio one is believed to have."""
        if kind == 0 or self._timed_steps[kind]:
            return kind
        similar = (k for k, model in enumerate(self._models) if model == self._models[kind])
        known = (k for k in similar if k and self._timed_steps[k])
        return min(known, key=lambda k: abs(k - kind), default=kind)
