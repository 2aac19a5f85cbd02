"""Takes what the host offers where it expects more tokens a second than the best draft model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from heapq import merge
from math import exp, log
from typing import Protocol

from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.draft.costs import MAX_CORRECTION, StepContext
from specbuild.runtime.draft.host_proposal import WAIT_FOR_TOKENS, ProposedDepths, WaitForTokens
from specbuild.runtime.draft.policy import ChosenDraft, DraftPolicy, MeasuredPolicy, StepOutcome

# An offer must promise this much more than the model's best draft, or than none.
PROPOSAL_MARGIN = 1.02
# How fast the times of steps with an offer follow the newest, and fall back to the table's.
TIME_RATE = 0.1
DECAY = 0.995
# How fast the distance of offers follows the newest.
INTERVAL_RATE = 0.2


class HostProposalCosts(Protocol):
    """What steps with an offer cost.

    ``ratio`` is what the times of steps without a draft are to be multiplied with on this machine.
    """

    def best(self, step_context: StepContext, ratio: float) -> tuple[tuple[int, ...], float]:
        """How much of each chain to verify, and the tokens a second and sequence."""
        ...

    def learn(self, outcome: StepOutcome, ratio: float) -> None:
        """A step with an offer is through, and was timed."""
        ...


class ProposalTimes:
    """Seconds of a step with an offer, by its rows: the table's, corrected by a run's own."""

    def __init__(self, table: CostTable, max_rows: int) -> None:
        self._step_s = [0.0, *(table.step_s(rows) for rows in range(1, max_rows + 1))]
        self._corrections = [0.0] * (max_rows.bit_length() + 1)

    def step_s(self, rows: int) -> float:
        """Of so many rows, on a machine as the table knows it."""
        return self._step_s[rows] * exp(self._corrections[rows.bit_length()])

    def best(self, step_context: StepContext, ratio: float) -> tuple[tuple[int, ...], float]:
        """See :class:`HostProposalCosts`."""
        depths, rate = best_depths(step_context.cumulative_probs, self)
        return depths, rate / (step_context.batch * ratio)

    def learn(self, outcome: StepOutcome, ratio: float) -> None:
        """See :class:`HostProposalCosts`."""
        assert outcome.step_s
        rows = outcome.step_context.batch + sum(outcome.depths)
        kind = rows.bit_length()
        self._corrections = [DECAY * correction for correction in self._corrections]
        error = log(outcome.step_s / (self._step_s[rows] * ratio)) - self._corrections[kind]
        self._corrections[kind] += TIME_RATE * min(max(error, -MAX_CORRECTION), MAX_CORRECTION)


def best_depths(
    cumulative_probs: Sequence[Sequence[float]], times: ProposalTimes
) -> tuple[tuple[int, ...], float]:
    """How much of each chain to verify, and the tokens a second of all together.

    Of all sequences' tokens those with the largest chances are taken, as many as give the most
    expected tokens, 1 for each sequence and the chances, over the time of so many rows.
    """
    batch = len(cumulative_probs)
    nodes = merge(*([(-p, b) for p in chain] for b, chain in enumerate(cumulative_probs)))
    expected, taken = float(batch), [0] * batch
    best_rate, best = expected / times.step_s(batch), tuple(taken)
    for rows, (negated, b) in enumerate(nodes, start=batch + 1):
        expected -= negated
        taken[b] += 1
        rate = expected / times.step_s(rows)
        if rate > best_rate:
            best_rate, best = rate, tuple(taken)
    return best, best_rate


class _ProposalsFirst(ABC):
    """The offer of a step where it pays, or what ``model`` would choose.

    Where tokens are in flight a step with an offer must wait for them. It does so where what
    is offered behind them pays, and behind a step with an offer, which repeats more often than not.
    """

    def __init__(self, model: DraftPolicy, *, max_chain: int) -> None:
        self._chooser = model
        self.max_depth = max(model.max_depth, max_chain)
        self._steps = self._proposed = 0
        self._chose_proposal = False

    @property
    def reason(self) -> str:
        """How often an offer was taken, and what the model's policy last chose."""
        share = 100 * self._proposed / max(self._steps, 1)
        return f"suffixes in {share:.0f} % of steps; else {self._chooser.reason}"

    def shape(self, step_context: StepContext) -> ChosenDraft | WaitForTokens:
        """The offer as far as it pays, else the model's choice."""
        if step_context.has_unread_tokens and self._chose_proposal:
            return WAIT_FOR_TOKENS
        depths = self._best_proposal(step_context) if any(step_context.cumulative_probs) else None
        if depths is not None and step_context.has_unread_tokens:
            return WAIT_FOR_TOKENS
        self._steps += 1
        self._chose_proposal = depths is not None
        if depths is None:
            return self._model_shape(step_context)
        self._proposed += 1
        return ProposedDepths(depths)

    def _model_shape(self, step_context: StepContext) -> ChosenDraft | WaitForTokens:
        return self._chooser.shape(step_context)

    @abstractmethod
    def _best_proposal(self, step_context: StepContext) -> tuple[int, ...] | None:
        """How much of each chain to verify, None where the model's choice expects more."""


class UnmeasuredProposals(_ProposalsFirst):
    """Where no costs were measured: an offer that expects more than the model's draft can give.

    Without a model that is one token more than without an offer.
    """

    def _best_proposal(self, step_context: StepContext) -> tuple[int, ...] | None:
        expected = sum(map(sum, step_context.cumulative_probs))
        pays = expected >= step_context.batch * (1 + self._chooser.max_depth)
        return tuple(map(len, step_context.cumulative_probs)) if pays else None

    def observe(self, outcome: StepOutcome) -> None:
        """Learns nothing."""


class ProposalPolicy(_ProposalsFirst):
    """The offer of a step, or what ``model`` would choose, whichever expects more.

    The offer's rate is that of the tokens that its chances promise, over the time of a step that
    verifies them; the model's is that of its policy. ``most_depth`` bounds what is ever offered.

    The model is asked as if the output ended with the next offer, by how far apart offers were so
    far: what it costs to start drafting, and to try shapes, must be earned until then.
    """

    def __init__(self, model: MeasuredPolicy, costs: HostProposalCosts, *, max_chain: int) -> None:
        super().__init__(model, max_chain=max_chain)
        self._model = model
        self._costs = costs
        self._after_proposal = False
        self._interval: float | None = None
        self._since_proposal = 0.0

    def _best_proposal(self, step_context: StepContext) -> tuple[int, ...] | None:
        depths, rate = self._costs.best(step_context, self._model.time_ratio(step_context.batch))
        pays = any(depths) and rate > PROPOSAL_MARGIN * self._model.best_rate(
            self._until_proposal(step_context)
        )
        return depths if pays else None

    def _model_shape(self, step_context: StepContext) -> ChosenDraft | WaitForTokens:
        return self._model.shape(self._until_proposal(step_context))

    def _until_proposal(self, step_context: StepContext) -> StepContext:
        """What is known before a step, with the tokens up to the next offer for those left."""
        if self._interval is None:
            return step_context
        expected = max(round(self._interval - self._since_proposal), 1)
        return replace(step_context, tokens_left=min(step_context.tokens_left, expected))

    def _count(self, outcome: StepOutcome) -> None:
        """Learns how many tokens lie between two offers that are taken."""
        if isinstance(outcome.shape, ProposedDepths):
            interval = self._since_proposal
            if interval and self._interval is not None:
                interval = self._interval + INTERVAL_RATE * (interval - self._interval)
            self._interval = interval or self._interval
            self._since_proposal = 0.0
        elif outcome.accepted:
            self._since_proposal += 1 + sum(outcome.accepted) / len(outcome.accepted)

    def observe(self, outcome: StepOutcome) -> None:
        """The model's policy learns of its own steps, the times of those with an offer."""
        self._count(outcome)
        after_proposal, shape = self._after_proposal, outcome.shape
        self._after_proposal = isinstance(shape, ProposedDepths)
        if not isinstance(shape, ProposedDepths):
            # Behind an offer a draft model takes up what the offer gave: no usual time.
            unusual = after_proposal and shape is not None
            self._model.observe(replace(outcome, step_s=None) if unusual else outcome)
        elif outcome.step_s:
            self._costs.learn(outcome, self._model.time_ratio(outcome.step_context.batch))
