"""A policy with several draft models: it finds the faster one, with the cost of a switch."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest

from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.draft.costs import ChainCosts, ChainsByModel, StepContext, StepTimes
from specbuild.runtime.draft.device_costs import prior_costs
from specbuild.runtime.draft.draft_models import ModelShape, model_of
from specbuild.runtime.draft.policy import (
    DraftPolicy,
    FixedPolicy,
    MeasuredPolicy,
    StepOutcome,
)
from specbuild.runtime.draft.sequence_policy import LearnedPolicies
from specbuild.runtime.engine_dir.manifest import DraftShape

ROWS = tuple(range(1, 9))
TARGET_S = tuple(2e-3 * (1 + 0.08 * (rows - 1)) for rows in ROWS)
ROW_S = 2e-5
# One model drafts level by level, the other a complete chain in one pass.
LEVELS = CostTable(ROWS, TARGET_S, tuple(0.2e-3 + 0.15e-3 * d for d in range(1, 8)), ROW_S)
PASS = CostTable(ROWS, TARGET_S, (0.5e-3,) * 7, ROW_S)
TABLES = {"levels": (LEVELS, 7), "pass": (PASS, 7)}


def policy(tables: dict[str, tuple[CostTable, int]] = TABLES) -> MeasuredPolicy:
    return MeasuredPolicy(ChainsByModel(tables, origin="given"))


class Simulated:
    """Steps with the times of the tables. A model ingests its pending tokens when it drafts."""

    def __init__(
        self, chances: dict[str, float], seed: int, *, slower: float = 1.0, row_s: float = ROW_S
    ) -> None:
        self.chances, self.random = chances, np.random.default_rng(seed)
        self.slower, self.row_s = slower, row_s
        self.behind = dict.fromkeys(chances, 1)
        self.seconds, self.tokens = 0.0, 0

    def run(self, chosen: DraftPolicy, steps: int) -> list[str]:
        """Return the models that drafted, the newest last; empty for none."""
        used = []
        for _ in range(steps):
            first, *others = self.behind.values()
            step_context = StepContext(1, 10_000, first, other_pending_rows=tuple(others))
            shape = chosen.shape(step_context)
            assert shape is None or isinstance(shape, DraftShape)
            kind = "" if shape is None else model_of(shape)
            depth = 0 if shape is None else shape.draft_depth
            step_s = TARGET_S[depth]
            if kind:
                table = TABLES[kind][0]
                step_s += table.chain_s(depth) + self.row_s * self.behind[kind]
            step_s *= self.slower
            hits = self.random.random(depth) < self.chances.get(kind, 0.0)
            accepted = depth if hits.all() else int(np.argmin(hits))
            chosen.observe(StepOutcome(step_context, shape, [depth], [accepted], step_s))
            for name in self.behind:
                self.behind[name] = accepted + 1 + self.behind[name] * (name != kind)
            self.seconds += step_s
            self.tokens += accepted + 1
            used.append(kind)
        return used

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def alone(kind: str, chance: float, seed: int) -> float:
    """Return the tokens per second of the same policy with one of the models."""
    engine = Simulated({kind: chance}, seed)
    engine.run(policy({kind: TABLES[kind]}), 1200)
    return engine.rate


@pytest.mark.parametrize(
    "chances",
    [
        {"levels": 0.8, "pass": 0.3},
        {"levels": 0.3, "pass": 0.8},
        {"levels": 0.7, "pass": 0.7},
        {"levels": 0.1, "pass": 0.05},
    ],
    ids=str,
)
def test_auto_is_about_as_fast_as_the_better_draft(chances: dict[str, float]) -> None:
    """At least 0.97 of it, as the median of seeds."""
    ratios = []
    for seed in range(5):
        engine = Simulated(chances, seed)
        engine.run(policy(), 1200)
        ratios.append(engine.rate / max(alone(kind, p, seed) for kind, p in chances.items()))
    assert np.median(ratios) >= 0.97


def test_the_better_model_changes_with_the_text() -> None:
    engine, chosen = Simulated({"levels": 0.85, "pass": 0.2}, 0), policy()
    assert engine.run(chosen, 400)[-50:].count("levels") > 40
    engine.chances = {"levels": 0.2, "pass": 0.85}
    assert engine.run(chosen, 400)[-50:].count("pass") > 40


class Believed:
    """Chains of 4 of both models without a measured time, as on a device."""

    origin = "believed"

    def __init__(self, *kinds: str) -> None:
        self.shapes = tuple(ModelShape(1, 4, 4, kind) for kind in kinds)
        table = prior_costs(self.shapes, batch=3)
        self._times = [table.step_s(s, batch=1, context=0) for s in (None, *self.shapes)]

    def step_s(self, step_context: StepContext) -> list[float]:
        del step_context
        return self._times

    def catch_up_s(self, shape: DraftShape, step_context: StepContext) -> float:
        del shape, step_context
        return 0.0


@pytest.mark.parametrize("slower", [0.2, 1.0, 8.0])
@pytest.mark.parametrize(
    ("chances", "share"),
    [
        ({"levels": 0.8, "pass": 0.3}, 0.96),
        ({"levels": 0.3, "pass": 0.8}, 0.97),
        # These differ by a tenth of a step's time.
        ({"levels": 0.7, "pass": 0.7}, 0.93),
    ],
    ids=str,
)
def test_the_better_draft_is_found_in_few_steps_without_measured_times(
    chances: dict[str, float], share: float, slower: float
) -> None:
    """At this fraction of the better chain, for any duration of steps."""
    ratios = []
    for seed in range(5):
        engine = Simulated(chances, seed, slower=slower, row_s=0.0)
        engine.run(MeasuredPolicy(Believed(*chances)), 1200)
        rates = []
        for kind, chance in chances.items():
            alone = Simulated({kind: chance}, seed, slower=slower, row_s=0.0)
            alone.run(FixedPolicy(ModelShape(1, 4, 4, kind), max_depth=4, reason=""), 1200)
            rates.append(alone.rate)
        ratios.append(engine.rate / max(rates))
    assert np.median(ratios) >= share


class TakenUpAlways(ChainsByModel):
    """As on a device, where every model ingests the tokens of every step."""

    def catch_up_s(self, shape: DraftShape, step_context: StepContext) -> float:
        del shape, step_context
        return 0.0


def test_a_draft_without_pending_tokens_is_tried_in_two_steps() -> None:
    """Without pending tokens two trial steps give a time to learn from."""
    engine = Simulated({"levels": 0.9, "pass": 0.1}, 3)
    used = engine.run(MeasuredPolicy(TakenUpAlways(TABLES, origin="given")), 600)
    tried = [len(list(run)) for kind, run in groupby(used[20:]) if kind == "pass"]
    assert tried and max(tried) <= 2
    assert used.count("levels") > 500


def test_pending_tokens_add_to_the_cost_of_a_draft() -> None:
    """A model with many pending tokens is worth it only for many tokens."""
    chosen, step_context = policy(), StepContext(1, 10_000, 0, other_pending_rows=(0,))
    for kind, accepted in (("levels", 1), ("pass", 4)) * 40:
        shape = ModelShape(1, 4, 4, kind)
        chosen.observe(StepOutcome(step_context, shape, [4], [accepted], None))
    far = replace(step_context, other_pending_rows=(3000,))

    def best(step_context: StepContext) -> str | None:
        chosen.best_rate(step_context)
        return chosen._models[chosen._best_of(chosen._rates(step_context))]

    assert (best(step_context), best(far)) == ("pass", "pass")
    assert best(replace(far, tokens_left=30)) != "pass"


def test_cost_tables_are_compared_by_the_added_time_of_chains() -> None:
    """The target's time measured with the first model is used for both."""
    busy = CostTable(ROWS[:4], tuple(1.5 * t for t in TARGET_S[:4]), (0.5e-3,) * 3, ROW_S)
    both = ChainsByModel({"levels": (LEVELS, 7), "pass": (busy, 3)}, origin="given")
    times = both.step_s(StepContext(2, 9, 0, other_pending_rows=(0,)))
    calm = ChainCosts(replace(PASS, draft_s=(0.5e-3,) * 3), max_depth=3, origin="given")
    assert list(times[8:]) == pytest.approx(calm.step_s(StepContext(2, 9, 0))[1:])
    assert [model_of(s) for s in both.shapes] == ["levels"] * 7 + ["pass"] * 3
    shape = both.shapes[8]
    assert both.catch_up_s(shape, StepContext(1, 9, 5, other_pending_rows=(7,))) == pytest.approx(
        7 * ROW_S
    )


def test_times_of_one_draft_do_not_affect_another() -> None:
    times = StepTimes([None, "levels", "levels", "pass"])
    for _ in range(50):
        times.learn(0, 1.0)
        times.learn(1, 2.0)
    plain, first, second, other = times.ratios()
    assert second / plain == pytest.approx(2.0, rel=0.1)
    assert first / plain == pytest.approx(2.0, rel=0.1)
    assert other / plain < 1.4


def test_a_later_run_starts_from_the_statistics_of_each_draft() -> None:
    learned, costs = LearnedPolicies(), ChainsByModel(TABLES, origin="given")
    before = learned.next(costs, drafter="levels+pass")
    step_context = StepContext(1, 1000, 0, other_pending_rows=(0,))
    for _ in range(60):
        for kind, accepted in (("levels", 0), ("pass", 1)):
            shape = ModelShape(1, 1, 1, kind)
            before.observe(StepOutcome(step_context, shape, [1], [accepted], None))
    after = learned.next(costs, drafter="levels+pass").acceptance_by_model()
    assert after["levels"][0] < 0.4
    assert after["pass"][0] > 0.7
    before.shape(step_context)
    assert before.reason.startswith("chain of") and "pass" in before.reason


def test_shapes_of_two_models_differ() -> None:
    one, other = ModelShape(1, 3, 3, "levels"), ModelShape(1, 3, 3, "pass")
    assert one != other != DraftShape(1, 3, 3) != one
    assert (model_of(one), model_of(DraftShape(1, 3, 3))) == ("levels", "")
