"""Policies that verify a host proposal if it is faster than the best draft model."""

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

# Factor by which the rate of a proposal must exceed that of the best other choice.
PROPOSAL_MARGIN = 1.02
# Learning rate of the times of steps with a proposal, and their decay towards the table's.
TIME_RATE = 0.1
DECAY = 0.995
# Learning rate of the interval between proposals.
INTERVAL_RATE = 0.2


class HostProposalCosts(Protocol):
    """Costs of steps with a host proposal.

    ``ratio`` is the correction of the times of steps without a draft on this machine.
    """

    def best(self, step_context: StepContext, ratio: float) -> tuple[tuple[int, ...], float]:
        """Return how much of each chain to verify, and the tokens per second and sequence."""
        ...

    def learn(self, outcome: StepOutcome, ratio: float) -> None:
        """Learn from a timed step with a proposal."""
        ...


class ProposalTimes:
    """Seconds of a step with a proposal by its rows: the table's, corrected by own times."""

    def __init__(self, table: CostTable, max_rows: int) -> None:
        self._step_s = [0.0, *(table.step_s(rows) for rows in range(1, max_rows + 1))]
        self._corrections = [0.0] * (max_rows.bit_length() + 1)

    def step_s(self, rows: int) -> float:
        """Return the time of a step of ``rows`` rows, without the machine's correction."""
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
    """Return how much of each chain to verify, and the total tokens per second.

    Tokens of all sequences are added in order of probability. The best number of rows maximizes
    the expected tokens (1 per sequence plus the probabilities) over the time of the step.
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
    """Chooses a host proposal if it pays, else the choice of ``model``.

    A step with a proposal must wait for tokens in flight. The policy waits if the proposal after
    them pays, or if the last step had a proposal, since proposals often follow each other.
    """

    def __init__(self, model: DraftPolicy, *, max_chain: int) -> None:
        self._chooser = model
        self.max_depth = max(model.max_depth, max_chain)
        self._steps = self._proposed = 0
        self._chose_proposal = False

    @property
    def reason(self) -> str:
        """The share of steps with a proposal, and the reason of the model's policy."""
        share = 100 * self._proposed / max(self._steps, 1)
        return f"host proposals in {share:.0f} % of steps; else {self._chooser.reason}"

    def shape(self, step_context: StepContext) -> ChosenDraft | WaitForTokens:
        """Return the part of the proposal that pays, else the model's choice."""
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
        """Return how much of each chain to verify; None if the model's choice is faster."""


class UnmeasuredProposals(_ProposalsFirst):
    """A policy without measured costs: a proposal must expect more than the deepest draft.

    Without a draft model it must expect one token per step.
    """

    def _best_proposal(self, step_context: StepContext) -> tuple[int, ...] | None:
        expected = sum(map(sum, step_context.cumulative_probs))
        pays = expected >= step_context.batch * (1 + self._chooser.max_depth)
        return tuple(map(len, step_context.cumulative_probs)) if pays else None

    def observe(self, outcome: StepOutcome) -> None:
        """Learns nothing."""


class ProposalPolicy(_ProposalsFirst):
    """Chooses the host proposal or the choice of ``model``, whichever has the higher rate.

    The rate of a proposal is its expected tokens over the time of the step that verifies it.
    ``max_chain`` bounds the length of proposals.

    The model's policy assumes that the output ends at the next proposal, by the interval between
    earlier ones: the cost of switching to a draft model must be recovered until then.
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
        """Return the step context with the tokens left until the next proposal."""
        if self._interval is None:
            return step_context
        expected = max(round(self._interval - self._since_proposal), 1)
        return replace(step_context, tokens_left=min(step_context.tokens_left, expected))

    def _count(self, outcome: StepOutcome) -> None:
        """Update the mean number of tokens between two proposals that were verified."""
        if isinstance(outcome.shape, ProposedDepths):
            interval = self._since_proposal
            if interval and self._interval is not None:
                interval = self._interval + INTERVAL_RATE * (interval - self._interval)
            self._interval = interval or self._interval
            self._since_proposal = 0.0
        elif outcome.accepted:
            self._since_proposal += 1 + sum(outcome.accepted) / len(outcome.accepted)

    def observe(self, outcome: StepOutcome) -> None:
        """Pass model steps to the model's policy, and proposal steps to the proposal times."""
        self._count(outcome)
        after_proposal, shape = self._after_proposal, outcome.shape
        self._after_proposal = isinstance(shape, ProposedDepths)
        if not isinstance(shape, ProposedDepths):
            # After a proposal a draft model ingests its tokens, which makes the step longer.
            unusual = after_proposal and shape is not None
            self._model.observe(replace(outcome, step_s=None) if unusual else outcome)
        elif outcome.step_s:
            self._costs.learn(outcome, self._model.time_ratio(outcome.step_context.batch))
