"""The best part of a host proposal, by brute force; when it replaces a model's draft."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.draft.costs import ChainCosts, StepContext
from specbuild.runtime.draft.host_proposal import WAIT_FOR_TOKENS, ProposedDepths
from specbuild.runtime.draft.policy import FixedPolicy, MeasuredPolicy, StepOutcome
from specbuild.runtime.draft.proposal_policy import (
    ProposalPolicy,
    ProposalTimes,
    UnmeasuredProposals,
    best_depths,
)
from specbuild.runtime.engine_dir.manifest import DraftShape

TABLE = CostTable((1, 2, 4, 8, 16), (1.0, 1.2, 1.6, 2.4, 4.0), (0.3, 0.5, 0.7), sure=True)
CHAIN = st.lists(st.floats(0.01, 1.0), max_size=4).map(lambda c: tuple(sorted(c, reverse=True)))


def times(most_rows: int = 32) -> ProposalTimes:
    return ProposalTimes(TABLE, most_rows)


@given(st.lists(CHAIN, min_size=1, max_size=3))
@settings(deadline=None, max_examples=200)
def test_the_part_that_pays_is_the_best_of_all_parts(
    cumulative_probs: list[tuple[float, ...]],
) -> None:
    depths, rate = best_depths(cumulative_probs, times())
    batch = len(cumulative_probs)

    def rate_of(choice: Sequence[int]) -> float:
        expected = batch + sum(sum(c[:d]) for c, d in zip(cumulative_probs, choice, strict=True))
        return expected / times().step_s(batch + sum(choice))

    best = max(
        rate_of(c) for c in itertools.product(*(range(len(c) + 1) for c in cumulative_probs))
    )
    assert rate == pytest.approx(rate_of(depths)) == pytest.approx(best)


def policy(*, depth: int) -> ProposalPolicy:
    costs = ChainCosts(TABLE, max_depth=depth, origin="given")
    return ProposalPolicy(MeasuredPolicy(costs, exploration_share=0.0), times(), max_chain=8)


def step_context(*cumulative_probs: Sequence[float]) -> StepContext:
    chances = tuple(map(tuple, cumulative_probs))
    return StepContext(
        len(cumulative_probs), tokens_left=100, pending_rows=0, cumulative_probs=chances
    )


def test_likely_proposals_are_used_and_unlikely_ones_are_not() -> None:
    alone = policy(depth=0)
    assert alone.max_depth == 8
    assert alone.shape(step_context([0.99] * 8)) == ProposedDepths((8,))
    assert alone.shape(step_context([0.1, 0.05])) is None
    assert alone.shape(step_context([])) is None
    assert "in 33 % of steps" in alone.reason


def test_selects_the_larger_expectation_of_proposal_and_draft() -> None:
    """A chain of 3 that is always right beats an uncertain proposal, but not a sure one of 8."""
    both = policy(depth=3)
    for _ in range(60):
        both.observe(StepOutcome(step_context([]), DraftShape(1, 3, 3), [3], [3], None))
    chosen = both.shape(step_context([0.6, 0.4]))
    assert isinstance(chosen, DraftShape) and chosen.draft_depth == 3
    assert isinstance(both.shape(step_context([1.0] * 8)), ProposedDepths)


def test_times_of_steps_with_offers_are_learned() -> None:
    """If rows cost three times the table's value, the proposal is no longer worth it."""
    slow, cumulative_probs = policy(depth=0), step_context([0.5, 0.4, 0.3])
    before = slow.shape(cumulative_probs)
    assert isinstance(before, ProposedDepths)
    for _ in range(200):
        rows = 1 + before.depths[0]
        step_s = 3 * TABLE.step_s(rows)
        slow.observe(StepOutcome(cumulative_probs, before, before.depths, [0], step_s))
    after = slow.shape(cumulative_probs)
    assert after != before
    # What is not used any more is believed anew after a while.
    for _ in range(50):
        slow.observe(StepOutcome(cumulative_probs, ProposedDepths((8,)), [8], [0], TABLE.step_s(9)))
    other = [slow.shape(cumulative_probs) for _ in range(2)]
    assert other[0] == other[1]


def test_waits_for_tokens_in_flight_if_that_pays() -> None:
    """And after a proposal, for any proposal after its possible results."""
    alone, sure = policy(depth=0), step_context([0.99] * 8)
    assert alone.shape(replace(step_context([0.1]), has_unread_tokens=True)) is None
    assert alone.shape(replace(sure, has_unread_tokens=True)) is WAIT_FOR_TOKENS
    assert alone.shape(sure) == ProposedDepths((8,))
    assert alone.shape(replace(step_context([]), has_unread_tokens=True)) is WAIT_FOR_TOKENS
    assert alone.shape(step_context([])) is None
    assert alone.shape(replace(step_context([]), has_unread_tokens=True)) is None
    assert "in 25 % of steps" in alone.reason


def test_without_costs_an_offer_must_expect_more_than_a_draft_can_give() -> None:
    drafting = FixedPolicy(DraftShape(1, 2, 2), max_depth=2, reason="fixed")
    policy = UnmeasuredProposals(drafting, max_chain=8)
    assert policy.max_depth == 8
    assert policy.shape(step_context([0.9] * 3, [0.9])) == DraftShape(1, 2, 2)
    assert policy.shape(step_context([0.9] * 6, [0.9])) == ProposedDepths((6, 1))
    assert policy.shape(replace(step_context([]), has_unread_tokens=True)) is WAIT_FOR_TOKENS


def test_a_draft_is_started_for_the_tokens_up_to_the_next_offer() -> None:
    """Its ingestion is worth it for a hundred tokens, and not for two."""
    costs = ChainCosts(replace(TABLE, row_s=0.1), max_depth=3, origin="given")
    model = MeasuredPolicy(costs, exploration_share=0.0)
    both = ProposalPolicy(model, times(), max_chain=8)
    right = StepOutcome(step_context([]), DraftShape(1, 3, 3), [3], [3], None)
    for _ in range(40):
        both.observe(right)
    behind = replace(step_context([]), pending_rows=40)
    assert isinstance(both.shape(behind), DraftShape)
    for _ in range(40):
        both.observe(StepOutcome(step_context([]), None, [0], [0], None))
        both.observe(StepOutcome(step_context([]), ProposedDepths((8,)), [8], [8], None))
    assert both.shape(behind) is None
    assert isinstance(both.shape(step_context([])), DraftShape)


def test_the_draft_time_after_a_proposal_is_not_recorded() -> None:
    both, cumulative_probs = policy(depth=3), step_context([1.0] * 8)
    model = both._model
    both.observe(StepOutcome(cumulative_probs, ProposedDepths((8,)), [8], [8], None))
    both.observe(StepOutcome(cumulative_probs, DraftShape(1, 3, 3), [3], [3], 50.0))
    both.observe(StepOutcome(cumulative_probs, DraftShape(1, 3, 3), [3], [3], None))
    assert model.time_ratio(1) == pytest.approx(1.0)
    assert model.acceptance[0] > 0.6
