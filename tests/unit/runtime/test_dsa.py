"""When a step is sparse, is checked, or falls back to everything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.engine_dir.manifest import Dsa
from specbuild.runtime.lossy.dsa.state import (
    FIRST_CHECKS,
    LAST_CHECKS,
    Attends,
    Check,
    SequenceSelection,
)

CONFIG = Dsa(
    top_k=16, threshold=100, first_tokens=4, recent_tokens=8, min_agreement=0.75, check_interval=5
)
AGREED, PARTED = Check(1, 1, 0, 0), Check(1, 0, 0, 0)


def judged(selection: SequenceSelection, check: Check, checks: int) -> list[str]:
    """Run steps until this number of checks have this outcome."""
    steps: list[str] = []
    while steps.count("check") < checks:
        steps.append(stepped(selection, 200, check))
    return steps


def stepped(selection: SequenceSelection, length: int, check: Check = AGREED) -> Attends:
    """Begin and end one step; return its result if it is a check."""
    attends = selection.begin(length)
    selection.ended(attends, length, check if attends == "check" else None)
    return attends


def test_no_check_below_the_threshold() -> None:
    selection = SequenceSelection(CONFIG, 16)
    assert {stepped(selection, length) for length in range(100)} == {"whole"}
    assert stepped(selection, 100) == "check"
    assert selection.counters.narrowed_steps == 0


@pytest.mark.parametrize("length", [5, 100, 5000])
def test_a_request_may_disable_selection(length: int) -> None:
    selection = SequenceSelection(CONFIG, 0)
    assert {stepped(selection, length) for _ in range(20)} == {"whole"}
    assert selection.budget == -1


def test_checks_run_first_and_then_at_their_interval() -> None:
    selection = SequenceSelection(CONFIG, 16)
    steps = judged(selection, AGREED, FIRST_CHECKS + 2)
    assert steps == ["check"] * FIRST_CHECKS + (["sparse"] * 4 + ["check"]) * 2
    stats = selection.counters.stats()
    assert (stats.checked_steps, stats.narrowed_steps, stats.agreement) == (10, 8, 1.0)
    assert stats.fallback_steps == 0


def test_a_step_that_was_begun_too_far_ahead_counts_for_nothing() -> None:
    """Its length was overestimated: all of its rows were below the threshold."""
    selection = SequenceSelection(CONFIG, 16)
    for _ in range(3):
        assert selection.begin(101) == "check"
        selection.ended("check", 99, PARTED)
    steps = judged(selection, AGREED, FIRST_CHECKS)
    assert steps == ["check"] * FIRST_CHECKS
    assert selection.begin(200) == "sparse"
    selection.ended("sparse", 99)
    stats = selection.counters.stats()
    assert (stats.checked_steps, stats.agreement, stats.narrowed_steps) == (FIRST_CHECKS, 1.0, 0)


def test_without_an_interval_nothing_is_checked() -> None:
    selection = SequenceSelection(replace(CONFIG, check_interval=0), 16)
    assert {stepped(selection, 200) for _ in range(40)} == {"sparse"}
    assert selection.counters.stats().agreement is None


def test_low_agreement_falls_back_and_recovers() -> None:
    selection = SequenceSelection(CONFIG, 16)
    judged(selection, PARTED, FIRST_CHECKS)
    assert [stepped(selection, 200) for _ in range(5)] == ["fallback"] * 4 + ["check"]
    steps = judged(selection, AGREED, LAST_CHECKS)
    assert steps[:4] == ["fallback"] * 4
    assert steps[-5:] == ["sparse"] * 4 + ["check"]
    assert selection.counters.stats().fallback_steps > 8


def test_drafts_accepted_by_full_attention_only_lower_the_agreement() -> None:
    fewer = Check(4, 4, 3, 1)
    selection = SequenceSelection(CONFIG, 16)
    judged(selection, fewer, FIRST_CHECKS)
    assert selection.is_agreement_low
    kinder = SequenceSelection(replace(CONFIG, min_agreement=0.5), 16)
    judged(kinder, fewer, FIRST_CHECKS)
    assert not kinder.is_agreement_low
    stats = kinder.counters.stats()
    assert (stats.accepted_narrowed, stats.accepted_whole) == (8, 24)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=40), st.floats(0, 1))
def test_falls_back_exactly_if_the_last_checks_agree_less(
    outcomes: list[tuple[int, int]], least: float
) -> None:
    selection = SequenceSelection(replace(CONFIG, min_agreement=least, check_interval=1), 16)
    checks = [Check(tokens, min(tokens, agreed), 0, 0) for tokens, agreed in outcomes]
    for check in checks:
        assert stepped(selection, 200, check) == "check"
    last = checks[-LAST_CHECKS:]
    few = len(last) < FIRST_CHECKS
    below = sum(c.agreed for c in last) < least * sum(c.tokens for c in last)
    assert selection.is_agreement_low == (below and not few)
