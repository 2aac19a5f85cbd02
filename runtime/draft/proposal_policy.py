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

# The rate of a proposal must exceed the best rate of the other choices by this factor.
PROPOSAL_MARGIN = 1.02
# Prior time that as many rows again add to a step, as a share of it.
ROWS_SHARE = 0.25
# Learning rate of the corrections of step times, and their decay towards 0 per timed step.
TIME_RATE = 0.1
DECAY = 0.995
# Learning rate of the mean interval between proposals, in tokens.
INTERVAL_RATE = 0.2


class HostProposalCosts(Protocol):
    """Costs of steps with a host proposal.

    ``ratio`` is the measured time of a step without a draft on this machine over the table's time.
    """

    def best(self, step_context: StepContext, ratio: float) -> tuple[tuple[int, ...], float]:
        """Return the depth of each chain to verify, and the tokens per second and sequence."""
        ...

    def learn(self, outcome: StepOutcome, ratio: float) -> None:
        """Learn from a timed step with a proposal."""
        ...


class ProposalTimes:
    """Seconds of a step with a proposal, by its number of rows.

    The times come from a table and are corrected by the measured times of such steps.
    """

    def __init__(self, table: CostTable, max_rows: int) -> None:
        self._step_s = [0.0, *(table.step_s(rows) for rows in range(1, max_rows + 1))]
        self._corrections = [0.0] * (max_rows.bit_length() + 1)

    def step_s(self, rows: int) -> float:
        """Return the seconds of a step of ``rows`` rows; the caller multiplies by ``ratio``."""
        return self._step_s[rows] * exp(self._corrections[rows.bit_length()])

    def best(self, step_context: StepContext, ratio: float) -> tuple[tuple[int, ...], float]:
        """See :class:`HostProposalCosts`."""
        depths, rate = best_depths(step_context.cumulative_probs, self)
        return depths, rate / (step_context.batch * ratio)

    def learn(self, outcome: StepOutcome, ratio: float) -> None:
        """See :class:`HostProposalCosts`."""
        assert outcome.step_s
        rows = outcome.step_context.batch + sum(outcome.depths)
        size_class = rows.bit_length()
        self._corrections = [DECAY * correction for correction in self._corrections]
        error = log(outcome.step_s / (self._step_s[rows] * ratio)) - self._corrections[size_class]
        self._corrections[size_class] += TIME_RATE * min(
            max(error, -MAX_CORRECTION), MAX_CORRECTION
        )


def best_depths(
    cumulative_probs: Sequence[Sequence[float]], times: ProposalTimes
) -> tuple[tuple[int, ...], float]:
    """Return the depth of each chain to verify, and the total tokens per second.

    Tokens of all sequences are added in descending order of probability. The best number of rows
    maximizes the expected tokens of the step over its time. A step is expected to emit 1 token per
    sequence plus the sum of the probabilities.
    """
    batch = len(cumulative_probs)
    nodes = merge(*([(-p, b) for p in chain] for b, chain in enumerate(cumulative_probs)))
    expected, depths = float(batch), [0] * batch
    best_rate, best = expected / times.step_s(batch), tuple(depths)
    for rows, (negated, b) in enumerate(nodes, start=batch + 1):
        expected -= negated
        depths[b] += 1
        rate = expected / times.step_s(rows)
        if rate > best_rate:
            best_rate, best = rate, tuple(depths)
    return best, best_rate


class _ProposalOrModel(ABC):
    """Chooses a host proposal if it is the faster choice, else the choice of ``model``.

    A step with a proposal must wait for the tokens in flight. The policy waits in two cases: the
    proposal after these tokens is the faster choice, or the last step had a proposal, since
    proposals often follow each other.
    """

    def __init__(self, model: DraftPolicy, *, max_chain: int) -> None:
        self._model_policy = model
        self.max_depth = max(model.max_depth, max_chain)
        self._steps = self._proposed = 0
        self._chose_proposal = False

    @property
    def reason(self) -> str:
        """The share of steps with a proposal, and the reason of the model's policy."""
        share = 100 * self._proposed / max(self._steps, 1)
        return f"host proposals in {share:.0f} % of steps; otherwise {self._model_policy.reason}"

    def shape(self, step_context: StepContext) -> ChosenDraft | WaitForTokens:
        """Return the best part of the proposal if it is faster, else the model's choice."""
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
        return self._model_policy.shape(step_context)

    @abstractmethod
    def _best_proposal(self, step_context: StepContext) -> tuple[int, ...] | None:
        """Return the depth of each chain to verify; None if the model's choice is faster."""


class UnmeasuredProposals(_ProposalOrModel):
    """A policy without measured costs, which compares expected accepted tokens.

    A proposal is chosen if it has at least D + 1 expected accepted tokens per sequence. D is the
    largest depth of the draft model, 0 without a model. D + 1/4 are enough if the step does not
    wait for those in flight: a step with twice the rows takes up to a quarter longer.
    """

    def _best_proposal(self, step_context: StepContext) -> tuple[int, ...] | None:
        expected = sum(map(sum, step_context.cumulative_probs))
        more = 1 if step_context.proposals_wait else ROWS_SHARE
        is_chosen = expected >= step_context.batch * (more + self._model_policy.max_depth)
        return tuple(map(len, step_context.cumulative_probs)) if is_chosen else None

    def observe(self, outcome: StepOutcome) -> None:
        """Pass the outcomes of model steps to the model's policy."""
        if not isinstance(outcome.shape, ProposedDepths):
            self._model_policy.observe(outcome)


class ProposalPolicy(_ProposalOrModel):
    """Chooses the host proposal or the choice of ``model``, whichever has the higher rate.

    The rate of a proposal is its expected tokens over the time of the step that verifies it.
    ``max_chain`` bounds the length of proposals.

    The start of a draft model has a cost, which must be recovered before the next proposal. So the
    model's policy receives a shorter ``tokens_left``: the expected tokens until the next proposal.
    The estimate comes from the mean interval between earlier proposals.
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
        is_faster = any(depths) and rate > PROPOSAL_MARGIN * self._model.best_rate(
            self._until_proposal(step_context)
        )
        return depths if is_faster else None

    def _model_shape(self, step_context: StepContext) -> ChosenDraft | WaitForTokens:
        return self._model.shape(self._until_proposal(step_context))

    def _until_proposal(self, step_context: StepContext) -> StepContext:
        """Return the step context; ``tokens_left`` ends at the next expected proposal."""
        if self._interval is None:
            return step_context
        expected = max(round(self._interval - self._since_proposal), 1)
        return replace(step_context, tokens_left=min(step_context.tokens_left, expected))

    def _count(self, outcome: StepOutcome) -> None:
        """Update the mean number of tokens between two verified proposals."""
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
            # In the step after a proposal the draft model also ingests the proposal's tokens. So
            # the time of this step is ignored.
            ingests_proposal = after_proposal and shape is not None
            self._model.observe(replace(outcome, step_s=None) if ingests_proposal else outcome)
        elif outcome.step_s:
            self._costs.learn(outcome, self._model.time_ratio(outcome.step_context.batch))
