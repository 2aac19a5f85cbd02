"""Costs of a step with each draft, and their correction by the step times of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Protocol

from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.draft.draft_models import ModelShape, model_of
from specbuild.runtime.engine_dir.manifest import DraftShape

# Learning rate of the level, which all kinds of steps share.
LEVEL_RATE = 0.2
# Learning rate of the correction of one kind.
KIND_RATE = 0.05
# Decay of the number of timed steps.
DECAY = 0.99
# Largest error that one step contributes: a disturbed step can be longer by any amount.
MAX_CORRECTION = log(1.5)


@dataclass(frozen=True, slots=True)
class StepContext:
    """The state before a step.

    ``tokens_left`` is the largest number of tokens that any of the ``batch`` sequences may still
    emit. ``pending_rows`` is the number of committed tokens that the draft model must ingest first;
    ``other_pending_rows`` has this number for the second and further draft models. ``context`` is
    the mean length of the sequences. ``num_sampled`` is the number of sequences with a temperature
    above 0. ``full_logits``: a sequence has top-k or top-p. ``cumulative_probs[b]`` has the
    acceptance probabilities of the host proposal for sequence b, empty without a proposal.
    ``proposals_wait``: the step that verifies a proposal starts after those in flight were read.
    ``has_unread_tokens``: there are such steps. The proposal then assumes that these steps emit the
    largest possible number of tokens. ``sequences`` are the indices of the sequences, in order, if
    each may have its own depth. ``rows`` is the number of rows of a device's step with sequences
    in between that do not take part, 0 without such sequences.
    """

    batch: int
    tokens_left: int
    pending_rows: int
    context: int = 0
    num_sampled: int = 0
    full_logits: bool = False
    cumulative_probs: tuple[tuple[float, ...], ...] = ()
    has_unread_tokens: bool = False
    proposals_wait: bool = True
    other_pending_rows: tuple[int, ...] = ()
    sequences: tuple[int, ...] = ()
    rows: int = 0


class DraftCosts(Protocol):
    """The drafts available to a step, and the cost of a step with each of them."""

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """Every available draft: chains by depth, then trees."""
        ...

    def catch_up_s(self, shape: DraftShape, step_context: StepContext) -> float:
        """Return the seconds in which the draft model of this shape ingests its pending rows."""
        ...

    @property
    def origin(self) -> str:
        """A phrase that states the source of the costs."""
        ...

    def step_s(self, step_context: StepContext) -> Sequence[float]:
        """Return the seconds of a step without a draft, then with each of ``shapes``.

        A step that does not exist for this batch and these rows has infinite cost.
        """
        ...


class ChainCosts:
    """Costs of chains up to ``max_depth``, from a cost table."""

    def __init__(self, table: CostTable, *, max_depth: int, origin: str) -> None:
        deepest = min(max_depth, len(table.draft_s))
        self.shapes = tuple(DraftShape(1, depth, depth) for depth in range(1, deepest + 1))
        self.origin = origin
        self._table = table
        self._costs_by_batch: dict[int, list[float]] = {}

    def step_s(self, step_context: StepContext) -> Sequence[float]:
        """See :class:`DraftCosts`.

        The cost of drafting is equal for all batch sizes, since a launch reads the weights once.
        """
        batch = step_context.batch
        costs = self._costs_by_batch.get(batch)
        if costs is None:
            costs = self._costs_by_batch[batch] = [
                self._table.step_s(batch * (depth + 1)) + self._table.chain_s(depth)
                for depth in range(len(self.shapes) + 1)
            ]
        return costs

    def catch_up_s(self, shape: DraftShape, step_context: StepContext) -> float:  # noqa: ARG002
        """See :class:`DraftCosts`."""
        return step_context.pending_rows * self._table.row_s


class ChainsByModel:
    """Costs of chains of several draft models.

    ``tables`` has the cost table and the largest depth of each kind. All kinds use the target times
    of the table with the largest number of rows. Otherwise a load that changes between two
    measurements would favor a model. The time that a chain adds changes less: it is the difference
    of two steps measured together.
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
        index = [*self._chains].index(kind)
        pending = (step_context.pending_rows, *step_context.other_pending_rows, *[0] * index)[index]
        return self._chains[kind].catch_up_s(shape, replace(step_context, pending_rows=pending))


class StepTimes:
    """Corrections of a cost table by the step times of a run.

    The time of a step of kind k is time_k = table_k · exp(level + c_k). All kinds share the level;
    c_k corrects the table's entry of kind k. Each timed step moves level and c_k so that time_k
    approaches the measured time. Kind 0 is a step without a draft. Any other kind that was never
    timed uses the correction of the nearest timed kind of the same draft model. ``models[k]`` is
    the draft model of kind k.
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
        """Return the factor of each kind's time in the table."""
        if self._ratios is None:
            similar = map(self._similar_kind, range(len(self._corrections)))
            self._ratios = [exp(self._level + self._corrections[kind]) for kind in similar]
        return self._ratios

    def timed(self, kind: int) -> float:
        """Return the decayed number of timed steps of a kind."""
        return self._timed_steps[kind]

    def learn(self, kind: int, ratio: float) -> None:
        """Learn from a timed step; ``ratio`` is its time over the time in the table."""
        correction = self._corrections[self._similar_kind(kind)]
        error = log(ratio) - self._level - correction
        error = min(max(error, -MAX_CORRECTION), MAX_CORRECTION)
        self._steps += 1
        self._timed_steps = [DECAY * n for n in self._timed_steps]
        self._timed_steps[kind] += 1
        level_rate = max(LEVEL_RATE, 1 / self._steps)
        kind_rate = (1 - level_rate) * max(KIND_RATE, 1 / (1 + self._timed_steps[kind]))
        self._level += level_rate * error
        self._corrections[kind] = correction + kind_rate * error
        self._ratios = None

    def _similar_kind(self, kind: int) -> int:
        """Return the kind whose correction applies to ``kind``: itself once it was timed."""
        if kind == 0 or self._timed_steps[kind]:
            return kind
        similar = (k for k, model in enumerate(self._models) if model == self._models[kind])
        timed = (k for k in similar if k and self._timed_steps[k])
        return min(timed, key=lambda k: abs(k - kind), default=kind)
