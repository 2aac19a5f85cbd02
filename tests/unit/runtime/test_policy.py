"""The policy takes the best chain by table and acceptance; costs are stored and checked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specbuild.runtime.draft.acceptance import PRIOR_GREEDY, PRIOR_SAMPLED, acceptance_prior
from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.draft.costs import ChainCosts, StepContext, StepTimes
from specbuild.runtime.draft.policy import MeasuredPolicy, StepOutcome
from specbuild.runtime.engine_dir.manifest import DraftShape

ROWS = (1, 2, 3, 4, 5)
CHEAP = CostTable(ROWS, (2.8e-3, 3.0e-3, 3.2e-3, 3.4e-3, 3.6e-3), (2e-4, 3e-4, 4e-4, 5e-4))
DEAR = CostTable(ROWS, (1e-3, 2e-3, 3e-3, 4e-3, 5e-3), (5e-4, 1e-3, 1.5e-3, 2e-3))


def drive(
    policy: MeasuredPolicy,
    chance: float,
    steps: int,
    *,
    truth: CostTable = CHEAP,
    seed: int = 0,
    left: int = 100_000,
    prompt: int = 0,
) -> list[int]:
    """Return the chosen depths for a probability of acceptance and times of steps."""
    random = np.random.default_rng(seed)
    depths = []
    behind = prompt
    for step in range(steps):
        step_context = StepContext(1, left - step, behind)
        shape = policy.shape(step_context)
        depth = 0 if shape is None else shape.draft_depth
        behind = 1 if depth else behind + 1
        depths.append(depth)
        hits = random.random(depth) < chance
        accepted = depth if hits.all() else int(np.argmin(hits))
        step_s = seconds(truth, depth)
        policy.observe(StepOutcome(step_context, shape, [depth], [accepted], step_s))
    return depths


def seconds(table: CostTable, depth: int) -> float:
    """Return a step's time with a chain."""
    return table.step_s(depth + 1) + (table.draft_s[depth - 1] if depth else 0.0)


def policy_of(table: CostTable) -> MeasuredPolicy:
    return MeasuredPolicy(ChainCosts(table, max_depth=4, origin="given"))


def best_depth(table: CostTable, chance: float) -> int:
    """Return the depth by the formula: expected tokens over time."""
    rates = [sum(chance**k for k in range(d + 1)) / seconds(table, d) for d in range(5)]
    return int(np.argmax(rates))


@pytest.mark.parametrize("chance", [0.95, 0.6, 0.3])
def test_converges_to_the_most_tokens_a_second(chance: float) -> None:
    depths = drive(policy_of(CHEAP), chance, 600)
    common = max(set(depths[300:]), key=depths[300:].count)
    assert abs(common - best_depth(CHEAP, chance)) <= 1


def test_a_failing_draft_costs_less_than_a_twentieth() -> None:
    """The time of 256 tokens with the policy and without a draft, for both tables."""
    for table in (CHEAP, DEAR):
        depths = drive(policy_of(table), 0.0, 256, truth=table)
        spent = sum(seconds(table, d) for d in depths)
        assert table.step_s(1) * 256 / spent > 0.95


def test_chains_that_cannot_pay_are_rarely_tried() -> None:
    assert sum(d > 0 for d in drive(policy_of(DEAR), 0.6, 500, truth=DEAR)) < 10


def test_a_draft_starts_if_the_remaining_output_pays_for_catching_up() -> None:
    table = replace(CHEAP, row_s=1e-4)
    short = drive(policy_of(table), 0.9, 16, truth=table, left=16, prompt=200)
    assert not any(short)
    assert all(drive(policy_of(table), 0.9, 8, truth=table, left=256, prompt=200))
    assert all(drive(policy_of(table), 0.9, 8, truth=table, left=16, prompt=10))


def test_one_disturbed_step_changes_nothing() -> None:
    policy = policy_of(CHEAP)
    drive(policy, 0.8, 5)
    policy.observe(StepOutcome(StepContext(1, 100, 0), DraftShape(1, 3, 3), [3], [1], 1.0))
    assert min(drive(policy, 0.8, 8)) > 0


def test_a_run_starts_from_half_of_the_previous_statistics() -> None:
    assert acceptance_prior(False) == PRIOR_GREEDY
    assert acceptance_prior(True, 0.8) == pytest.approx((PRIOR_SAMPLED + 0.8) / 2)
    policy = MeasuredPolicy(ChainCosts(CHEAP, max_depth=4, origin="given"), prior=0.3)
    assert policy.acceptance == pytest.approx([0.3] * 4)


def test_a_position_never_tried_is_believed_like_the_one_before_it() -> None:
    """Otherwise a chain that is always accepted would stop growing at an untried position."""
    policy = policy_of(CHEAP)
    for _ in range(60):
        policy.observe(StepOutcome(StepContext(1, 100, 0), DraftShape(1, 1, 1), [1], [1], None))
    first, *others = policy.acceptance
    assert others == pytest.approx([first] * len(others), abs=0.03)
    assert first > 0.85
    depths = drive(policy_of(CHEAP), 0.97, 200)
    assert max(depths[100:]) == len(CHEAP.draft_s)


def test_a_machine_that_slows_down_evenly_changes_nothing() -> None:
    slow = CostTable(
        ROWS, tuple(2 * t for t in CHEAP.target_s), tuple(2 * t for t in CHEAP.draft_s)
    )
    depths = drive(policy_of(CHEAP), 0.95, 300, truth=slow)
    assert np.mean(depths[100:]) > 3


def test_the_reason_shows_the_numbers() -> None:
    policy = policy_of(CHEAP)
    policy.shape(StepContext(1, 100, 0))
    assert "tokens/s expected" in policy.reason
    assert "step times given" in policy.reason


def test_steps_in_which_drafting_starts_or_stops_are_not_measured() -> None:
    policy, step_context = policy_of(CHEAP), StepContext(1, 100_000, 0)
    for shape, depth in ((DraftShape(1, 2, 2), 2), (None, 0)) * 40:
        policy.observe(StepOutcome(step_context, shape, [depth], [depth], 1.0))
    assert policy._times_of(1).ratios() == [1.0] * 5


def test_exploration_never_exceeds_its_share() -> None:
    table = replace(CHEAP, row_s=1e-3)
    assert not any(drive(policy_of(table), 0.9, 100, truth=table, left=2000, prompt=5000))


def test_one_measurement_changes_an_estimate_by_at_most_half() -> None:
    times = StepTimes([None, ""])
    times.learn(1, 1000.0)
    assert times.ratios() == pytest.approx([1.5, 1.5])


def test_a_slow_machine_affects_all_entries_and_a_wrong_entry_itself() -> None:
    times = StepTimes([None, "", ""])
    for _ in range(60):
        times.learn(0, 2.0)
    times.learn(1, 2.0)
    assert times.ratios() == pytest.approx([2.0, 2.0, 2.0], abs=0.1)
    for _ in range(30):
        times.learn(1, 4.0)
        times.learn(0, 2.0)
    # A chain that was never timed is believed to be as wrong as the nearest that was.
    assert times.ratios() == pytest.approx([2.0, 4.0, 4.0], rel=0.1)
