"""Drafts that change from step to step on a GPU, and the table of step costs that selects them."""

from __future__ import annotations

import random
from itertools import cycle

import pytest
from example_engine import CHAIN, TREE, records

from specbuild.runtime.decode.device.decoder import DeviceDecoder
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.device_costs import StepCosts, from_bytes, to_bytes
from specbuild.runtime.draft.policy import StepOutcome
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.measure.step_measurement import measure_step_costs
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

pytestmark = pytest.mark.speed

TOKENS = 64


class Scripted:
    """Requests one shape after the other, repeatedly."""

    max_depth = TREE.draft_depth
    reason = "scripted"

    def __init__(self, script: list[DraftShape | None]) -> None:
        self._script = cycle(script)
        self.accepted: dict[DraftShape | None, list[int]] = {}

    def shape(self, step_context: StepContext) -> DraftShape | None:
        del step_context
        return next(self._script)

    def observe(self, outcome: StepOutcome) -> None:
        self.accepted.setdefault(outcome.shape, []).extend(outcome.accepted)


@pytest.fixture(scope="module")
def costs(engine: Engine) -> StepCosts:
    return measure_step_costs(engine, print, budget_s=20.0, repeats=5)


def with_costs(engine: Engine, costs: StepCosts) -> Engine:
    return Engine(engine.manifest, engine.executor, text=engine.text, step_costs=costs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_changing_drafts_change_no_token_and_no_bit_of_a_logprob(
    engine: Engine, prompts: list[Prompt], costs: StepCosts, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=11)
    params = GenerateParams(max_new_tokens=TOKENS, sampling=sampling, ignore_eos=True)
    switching, rng = with_costs(engine, costs), random.Random(4)
    script = [None, CHAIN, TREE, *rng.choices([None, None, DraftShape(1, 1, 1), CHAIN], k=9)]
    policy = Scripted(script + [None] * 11)
    decoder = switching.decoder
    assert isinstance(decoder, DeviceDecoder)
    decoder._default_policy = lambda *_, **__: policy  # type: ignore[method-assign]
    for few in (prompts[:1], prompts[:7]):
        plain = records(engine, few, params, None)
        for a, b in zip(plain, records(switching, few, params), strict=True):
            assert a.output_ids == b.output_ids
            assert a.logprobs == b.logprobs
    executor = engine.executor
    assert isinstance(executor, CudaExecutor)
    assert any(name.endswith(".extends") for name in executor.runner._graphs)


def test_a_pause_does_not_change_the_acceptance_of_a_draft(
    engine: Engine, prompts: list[Prompt], costs: StepCosts
) -> None:
    params = GenerateParams(max_new_tokens=4 * TOKENS, ignore_eos=True)
    means = []
    for pause in (0, 9):
        policy = Scripted([*[None] * pause, CHAIN])
        paused = with_costs(engine, costs)
        paused.decoder._default_policy = lambda *_, p=policy, **__: p  # type: ignore[attr-defined]
        records(paused, prompts[:8], params)
        means.append(sum(policy.accepted[CHAIN]) / len(policy.accepted[CHAIN]))
    print(f"accepted of a chain of 3: {means[0]:.2f} at every step, {means[1]:.2f} after pauses")
    assert means[1] > 0.75 * means[0]


def test_every_step_is_in_the_table(engine: Engine, costs: StepCosts) -> None:
    assert from_bytes(to_bytes(costs)).shapes() == costs.shapes()
    assert {CHAIN, TREE} <= set(costs.shapes())
    assert costs.batches(None) == [1, 2, 4, 8]
    for c in costs.steps:
        assert all(1e-6 < t < 1 for t in c.step_s)
        if c.shape is not None:
            assert all(0 < d < s for d, s in zip(c.draft_s, c.step_s, strict=True))
    one, three = (costs.step_s(s, batch=1, context=64) for s in (None, CHAIN))
    assert one is not None
    assert three is not None
    assert one < three


def test_the_default_draft_follows_from_the_table(
    engine: Engine, prompts: list[Prompt], costs: StepCosts
) -> None:
    params = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    measured = with_costs(engine, costs)
    plain = records(engine, prompts[:4], params, None)
    for a, b in zip(plain, records(measured, prompts[:4], params), strict=True):
        assert a.output_ids == b.output_ids
        assert a.logprobs == b.logprobs
    print(measured.default_draft.reason)
    assert f"measured on {costs.gpu}" in measured.default_draft.reason
