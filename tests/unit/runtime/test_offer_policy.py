"""Which part of an offer pays, against every choice; when it goes before a model's draft."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.draft.costs import ChainCosts, Outlook
from specbuild.runtime.draft.offer import LATER, OfferedDepths
from specbuild.runtime.draft.offer_policy import (
    OfferPolicy,
    OfferTimes,
    UnmeasuredOffers,
    best_depths,
)
from specbuild.runtime.draft.policy import FixedPolicy, MeasuredPolicy, StepOutcome
from specbuild.runtime.engine_dir.manifest import DraftShape

TABLE = CostTable((1, 2, 4, 8, 16), (1.0, 1.2, 1.6, 2.4, 4.0), (0.3, 0.5, 0.7), sure=True)
CHAIN = st.lists(st.floats(0.01, 1.0), max_size=4).map(lambda c: tuple(sorted(c, reverse=True)))


def times(most_rows: int = 32) -> OfferTimes:
    return OfferTimes(TABLE, most_rows)


@given(st.lists(CHAIN, min_size=1, max_size=3))
@settings(deadline=None, max_examples=200)
def test_the_part_that_pays_is_the_best_of_all_parts(reach: list[tuple[float, ...]]) -> None:
    depths, rate = best_depths(reach, times())
    batch = len(reach)

    def rate_of(choice: Sequence[int]) -> float:
        expected = batch + sum(sum(c[:d]) for c, d in zip(reach, choice, strict=True))
        return expected / times().step_s(batch + sum(choice))

    best = max(rate_of(c) for c in itertools.product(*(range(len(c) + 1) for c in reach)))
    assert rate == pytest.approx(rate_of(depths)) == pytest.approx(best)


def policy(*, depth: int) -> OfferPolicy:
    costs = ChainCosts(TABLE, max_depth=depth, origin="given")
    return OfferPolicy(MeasuredPolicy(costs, explored_share=0.0), times(), most_depth=8)


def outlook(*reach: Sequence[float]) -> Outlook:
    chances = tuple(map(tuple, reach))
    return Outlook(len(reach), tokens_left=100, rows_behind=0, reach=chances)


def test_a_sure_offer_is_taken_and_an_unlikely_one_is_not() -> None:
    alone = policy(depth=0)
    assert alone.max_depth == 8
    assert alone.shape(outlook([0.99] * 8)) == OfferedDepths((8,))
    assert alone.shape(outlook([0.1, 0.05])) is None
    assert alone.shape(outlook([])) is None
    assert "in 33 % of steps" in alone.reason


def test_beside_a_model_the_larger_expectation_is_taken() -> None:
    """A chain of 3 that is always right beats a doubtful offer, and loses to a sure one of 8."""
    both = policy(depth=3)
    for _ in range(60):
        both.observe(StepOutcome(outlook([]), DraftShape(1, 3, 3), [3], [3], None))
    chosen = both.shape(outlook([0.6, 0.4]))
    assert isinstance(chosen, DraftShape) and chosen.draft_depth == 3
    assert isinstance(both.shape(outlook([1.0] * 8)), OfferedDepths)


def test_times_of_steps_with_offers_are_learned() -> None:
    """Where rows cost thrice what the table says, what paid does not any more."""
    slow, reach = policy(depth=0), outlook([0.5, 0.4, 0.3])
    before = slow.shape(reach)
    assert isinstance(before, OfferedDepths)
    for _ in range(200):
        rows = 1 + before.depths[0]
        step_s = 3 * TABLE.step_s(rows)
        slow.observe(StepOutcome(reach, before, before.depths, [0], step_s))
    after = slow.shape(reach)
    assert after != before
    # What is not used any more is believed anew after a while.
    for _ in range(50):
        slow.observe(StepOutcome(reach, OfferedDepths((8,)), [8], [0], TABLE.step_s(9)))
    other = [slow.shape(reach) for _ in range(2)]
    assert other[0] == other[1]


def test_tokens_in_flight_are_waited_for_where_that_pays() -> None:
    """And behind an offer, whatever is offered behind what it may give."""
    alone, sure = policy(depth=0), outlook([0.99] * 8)
    assert alone.shape(replace(outlook([0.1]), ahead=True)) is None
    assert alone.shape(replace(sure, ahead=True)) is LATER
    assert alone.shape(sure) == OfferedDepths((8,))
    assert alone.shape(replace(outlook([]), ahead=True)) is LATER
    assert alone.shape(outlook([])) is None
    assert alone.shape(replace(outlook([]), ahead=True)) is None
    assert "in 25 % of steps" in alone.reason


def test_without_costs_an_offer_must_expect_more_than_a_draft_can_give() -> None:
    drafting = FixedPolicy(DraftShape(1, 2, 2), max_depth=2, reason="fixed")
    policy = UnmeasuredOffers(drafting, most_depth=8)
    assert policy.max_depth == 8
    assert policy.shape(outlook([0.9] * 3, [0.9])) == DraftShape(1, 2, 2)
    assert policy.shape(outlook([0.9] * 6, [0.9])) == OfferedDepths((6, 1))
    assert policy.shape(replace(outlook([]), ahead=True)) is LATER


def test_a_draft_is_started_for_the_tokens_up_to_the_next_offer() -> None:
    """What it must take up first pays over a hundred tokens, and not over two."""
    costs = ChainCosts(replace(TABLE, row_s=0.1), max_depth=3, origin="given")
    model = MeasuredPolicy(costs, explored_share=0.0)
    both = OfferPolicy(model, times(), most_depth=8)
    right = StepOutcome(outlook([]), DraftShape(1, 3, 3), [3], [3], None)
    for _ in range(40):
        both.observe(right)
    behind = replace(outlook([]), rows_behind=40)
    assert isinstance(both.shape(behind), DraftShape)
    for _ in range(40):
        both.observe(StepOutcome(outlook([]), None, [0], [0], None))
        both.observe(StepOutcome(outlook([]), OfferedDepths((8,)), [8], [8], None))
    assert both.shape(behind) is None
    assert isinstance(both.shape(outlook([])), DraftShape)


def test_behind_an_offer_the_models_time_is_no_usual_one() -> None:
    both, reach = policy(depth=3), outlook([1.0] * 8)
    model = both._model
    both.observe(StepOutcome(reach, OfferedDepths((8,)), [8], [8], None))
    both.observe(StepOutcome(reach, DraftShape(1, 3, 3), [3], [3], 50.0))
    both.observe(StepOutcome(reach, DraftShape(1, 3, 3), [3], [3], None))
    assert model.time_ratio(1) == pytest.approx(1.0)
    assert model.acceptance[0] > 0.6
