"""What the default draft policy learns from a simulated engine with a simulated clock.

A step of d levels takes a given time, and more if drafting starts or stops. Each time has noise,
sometimes several times its length. Each level is accepted with a given probability.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from toy_plan import SHAPES, cuda_manifest, toy_plan

from specbuild.runtime.decode.device.program_costs import ProgramCosts
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.draft.choice import PolicyByLogits
from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.draft.costs import ChainCosts, DraftCosts, StepContext
from specbuild.runtime.draft.device_costs import METHOD, ShapeCosts, StepCosts
from specbuild.runtime.draft.policy import (
    EXPLORATION_SHARE,
    DraftPolicy,
    MeasuredPolicy,
    StepOutcome,
)
from specbuild.runtime.draft.sequence_policy import LearnedPolicies
from specbuild.runtime.engine_dir.manifest import DraftShape

ROWS = tuple(range(1, 8))
# Costs of the target's rows and of chains of 1, 2, …, as in the example engine.
TARGET_S = tuple(1.9e-3 * (1 + 0.08 * (rows - 1)) for rows in ROWS)
DRAFT_S = tuple(0.4e-3 + 0.11e-3 * depth for depth in range(6))
SWITCH_COST = 0.07
SEEDS = range(6)
WRONG = [(2, 2), (0.5, 0.5), (2, 1), (0.5, 1), (1, 2), (1, 0.5)]

Choice = DraftShape | None
MakeCosts = Callable[[float, float], DraftCosts]


def chains(target: float, draft: float) -> ChainCosts:
    """Return the host's table with parts scaled by these errors."""
    table = CostTable(
        ROWS, tuple(target * t for t in TARGET_S), tuple(draft * t for t in DRAFT_S), row_s=1e-5
    )
    return ChainCosts(table, max_depth=6, origin="given")


def programs(target: float, draft: float) -> ProgramCosts:
    """Return a device's table with parts scaled by these errors."""
    steps = []
    for shape in (None, *SHAPES):
        s = shape or DraftShape(0, 0, 0)
        draft_s = draft * (2e-4 + 1e-4 * s.draft_depth) if shape else 0.0
        step_s = target * 1e-3 * (1 + 0.08 * s.draft_tokens) + draft_s
        sizes = (s.draft_top_k, s.draft_depth, s.draft_tokens)
        steps.append(ShapeCosts(1, *sizes, (64,), (step_s,), (draft_s,)))
    table = ProgramTable(toy_plan(cuda_manifest()))
    return ProgramCosts(StepCosts("GPU", "d", METHOD, tuple(steps)), table, full_logits=False)


@dataclass
class Simulated:
    """An engine whose steps take the times of ``truth``. ``seconds`` is its clock."""

    truth: DraftCosts
    seed: int
    sampled: bool = False

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        kinds: tuple[Choice, ...] = (None, *self.truth.shapes)
        times = self.truth.step_s(StepContext(1, 1, 0))
        self.step_s = dict(zip(kinds, times, strict=True))
        self.seconds = 0.0
        self.tokens = 0
        self.behind = 1
        self.drafted = False

    def rates(self, chance: float) -> dict[Choice, float]:
        """Return the tokens per second of each shape."""
        return {s: tokens_of(s, chance) / self.step_s[s] for s in self.step_s}

    def run(
        self, policy: DraftPolicy, chance: float, steps: int, left: int = 100_000
    ) -> list[Choice]:
        """Return the shapes that the policy chooses."""
        asked = []
        for _ in range(steps):
            step_context = StepContext(1, left, self.behind, num_sampled=int(self.sampled))
            shape = policy.shape(step_context)
            step_s = self.step_s[shape] + (
                self.truth.catch_up_s(shape, step_context) if shape else 0.0
            )
            if (shape is not None) != self.drafted:
                step_s += SWITCH_COST * self.step_s[None]
            self.seconds += step_s
            seen_s = step_s * self.random.normal(1, 0.05)
            if self.random.random() < 0.05:
                seen_s *= 1 + self.random.exponential(4)
            depth = 0 if shape is None else shape.draft_depth
            hits = self.random.random(depth) < level_chance(shape, chance)
            accepted = depth if hits.all() else int(np.argmin(hits))
            policy.observe(StepOutcome(step_context, shape, [depth], [accepted], seen_s))
            self.drafted = shape is not None
            self.behind = 1 + accepted if depth else self.behind + 1
            self.tokens += 1 + accepted
            left -= 1 + accepted
            asked.append(shape)
        return asked

    def quality(self, asked: list[Choice], chance: float) -> float:
        """Return the mean rate of shapes divided by the best rate."""
        rates = self.rates(chance)
        return float(np.mean([rates[shape] for shape in asked]) / max(rates.values()))


def level_chance(shape: Choice, chance: float) -> float:
    """Return the acceptance probability of a level, which is higher with several nodes."""
    if shape is None or shape.draft_top_k == 1:
        return chance
    return float(1 - (1 - chance) / np.sqrt(shape.draft_tokens / shape.draft_depth))


def tokens_of(shape: Choice, chance: float) -> float:
    """Return the expected tokens of a step."""
    depth = 0 if shape is None else shape.draft_depth
    return sum(level_chance(shape, chance) ** k for k in range(depth + 1))


BOTH = pytest.mark.parametrize("costs", [chains, programs], ids=["host", "device"])


@BOTH
@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("chance", [0.2, 0.5, 0.9])
def test_a_table_that_is_wrong_by_two_is_corrected_within_50_steps(
    costs: MakeCosts, wrong: tuple[float, float], chance: float
) -> None:
    """Afterwards the choices are as good as with the correct table."""
    found = {wrong: [], (1.0, 1.0): []}
    for table, qualities in found.items():
        for seed in SEEDS:
            engine, policy = Simulated(costs(1, 1), seed), MeasuredPolicy(costs(*table))
            engine.run(policy, chance, 50)
            qualities.append(engine.quality(engine.run(policy, chance, 50), chance))
    assert np.mean(found[wrong]) > np.mean(found[1.0, 1.0]) - 0.04
    assert min(found[wrong]) > 0.8


@BOTH
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_the_time_of_the_step_in_use_is_known_within_50_steps(
    costs: MakeCosts, wrong: tuple[float, float]
) -> None:
    engine, policy = Simulated(costs(1, 1), 0), MeasuredPolicy(costs(*wrong))
    last = engine.run(policy, 0.7, 50)[-1]
    number = (None, *policy._costs.shapes).index(last)
    context = StepContext(1, 1000, 1)
    believed_s = policy._tokens(context)[number] / policy._rates(context)[number]
    assert believed_s == pytest.approx(engine.step_s[last], rel=0.2)


@BOTH
@pytest.mark.parametrize("prior", [0.4, 0.6])
@pytest.mark.parametrize("chance", [0.2, 0.9])
def test_acceptance_that_differs_from_the_prior_is_learned_within_20_steps(
    costs: MakeCosts, prior: float, chance: float
) -> None:
    found = []
    for seed in SEEDS:
        engine, policy = Simulated(costs(1, 1), seed), MeasuredPolicy(costs(1, 1), prior=prior)
        engine.run(policy, chance, 20)
        found.append(engine.quality(engine.run(policy, chance, 20), chance))
    assert np.mean(found) > 0.9
    assert min(found) > 0.85


@pytest.mark.parametrize("before", [60, 300, 1000])
def test_text_that_becomes_predictable_is_drafted_within_20_steps(before: int) -> None:
    """On most engines: after a rejected trial the next one is some steps away."""
    drafting = []
    for seed in range(12):
        engine, policy = Simulated(chains(1, 1), seed), MeasuredPolicy(chains(1, 1))
        engine.run(policy, 0.15, before)
        engine.run(policy, 0.9, 20)
        asked = engine.run(policy, 0.9, 10)
        drafting.append(np.mean([shape is not None for shape in asked]) > 0.5)
    assert np.mean(drafting) > 0.7


@BOTH
@pytest.mark.parametrize("length", [256, 1024])
def test_exploration_stays_within_its_share_if_no_draft_is_accepted(
    costs: MakeCosts, length: int
) -> None:
    """The only other costs are the few steps until the prior has fallen."""
    lost = []
    for seed in SEEDS:
        engine, policy = Simulated(costs(1, 1), seed), MeasuredPolicy(costs(1, 1))
        engine.run(policy, 0.0, length, left=length)
        plain_s = engine.tokens * engine.step_s[None]
        lost.append((engine.seconds - plain_s - 6 * engine.step_s[None]) / engine.seconds)
    assert np.mean(lost) < 1.25 * EXPLORATION_SHARE


@BOTH
def test_exploration_stays_within_its_share_if_a_draft_pays(costs: MakeCosts) -> None:
    """Compared with the best shape from the first step on."""
    lost = []
    for seed in SEEDS:
        engine, policy = Simulated(costs(1, 1), seed), MeasuredPolicy(costs(1, 1), prior=0.95)
        asked = engine.run(policy, 0.95, 200)
        best = max(engine.rates(0.95).values())
        spent_s = sum(engine.step_s[shape] for shape in asked)
        lost.append(1 - sum(tokens_of(shape, 0.95) for shape in asked) / best / spent_s)
    assert np.mean(lost) < 0.05


def test_a_smaller_share_explores_less() -> None:
    tried = []
    for share in (0.02, 0.002):
        engine = Simulated(chains(1, 1), 0)
        policy = MeasuredPolicy(chains(1, 1), exploration_share=share)
        tried.append(sum(shape is not None for shape in engine.run(policy, 0.0, 500)))
    assert tried[1] < tried[0] / 2


def test_sampled_and_greedy_steps_have_separate_statistics() -> None:
    learned = LearnedPolicies()
    policy = PolicyByLogits(lambda full_logits: learned.next(chains(1, 1), full_logits=full_logits))
    greedy = Simulated(chains(1, 1), 1)
    sampled = Simulated(chains(1, 1), 2, sampled=True)
    for _ in range(8):
        greedy.run(policy, 0.9, 10)
        sampled.run(policy, 0.1, 10)
    assert greedy.quality(greedy.run(policy, 0.9, 10), 0.9) > 0.9
    assert sampled.quality(sampled.run(policy, 0.1, 10), 0.1) > 0.9


def test_sampled_requests_do_not_change_statistics_of_greedy_ones() -> None:
    learned = LearnedPolicies()
    Simulated(chains(1, 1), 1).run(learned.next(chains(1, 1)), 0.9, 40)
    Simulated(chains(1, 1), 2, sampled=True).run(learned.next(chains(1, 1)), 0.1, 40)
    first, second = (learned.next(chains(1, 1)) for _ in range(2))
    assert first.acceptance == second.acceptance
    assert first.acceptance[0] > 0.7
    assert first.acceptance_by_model(sampled=True)[""][0] < 0.3


def test_times_persist_between_runs() -> None:
    """A table that favours drafts is wrong once, not in every run."""
    learned = LearnedPolicies()
    engine = Simulated(chains(1, 1), 3)
    engine.run(learned.next(chains(1, 2)), 0.8, 60)
    asked = engine.run(learned.next(chains(1, 2)), 0.8, 12)
    assert engine.quality(asked, 0.8) > 0.9


def test_a_shape_without_steps_for_a_larger_batch_is_not_requested_again() -> None:
    """Also if two trial steps of it were left."""
    policy = MeasuredPolicy(programs(1, 1), prior=0.01)
    step_context = StepContext(1, 1000, 0)
    while policy.shape(step_context) is None:
        policy.observe(StepOutcome(step_context, None, [0], [0], 1e-3))
    assert policy.shape(StepContext(4, 1000, 0)) is None
