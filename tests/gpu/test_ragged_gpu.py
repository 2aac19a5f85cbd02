"""Ragged steps on a GPU: different depths of sequences change no bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from example_engine import build_example, example_prompts, on_gpu, records

from specbuild.runtime.decode.device.decoder import DeviceDecoder
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.draft_models import RaggedShape
from specbuild.runtime.draft.policy import ChosenDraft, SequenceDepths, StepOutcome
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.measure.step_measurement import measure_step_costs
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

CHAIN = DraftShape(1, 4, 4)
RAGGED = RaggedShape(1, 4, 4, "", 4)
TOKENS = 96


class AnyDepths:
    """Draw any depths that fit into a ragged step; few sequences use the longest chain."""

    max_depth, reason = CHAIN.draft_depth, "any depths"

    def __init__(self) -> None:
        self._random = random.Random(7)
        self.outcomes: list[StepOutcome] = []

    def shape(self, step_context: StepContext) -> ChosenDraft:
        batch = step_context.batch
        if batch < 3:
            return CHAIN
        depths = [self._random.randint(0, CHAIN.draft_depth) for _ in range(batch)]
        while sum(depths) > batch * (RAGGED.rows_per_sequence - 1):
            depths[depths.index(max(depths))] -= 1
        return SequenceDepths(RAGGED, tuple(depths))

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with on_gpu(build_example(tmp_path_factory.mktemp("ragged") / "e", CHAIN)) as loaded:
        yield loaded


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("count", [3, 4, 8, 20])
def test_ragged_steps_change_no_bit(
    engine: Engine, count: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to eight sequences run together; others join as these end."""
    texts = example_prompts()
    prompts = [texts[i % len(texts)] for i in range(count)]
    params = [
        GenerateParams(
            max_new_tokens=TOKENS - 7 * (i % 5),
            sampling=SamplingParams(temperature=temperature, seed=i),
        )
        for i in range(count)
    ]
    plain = records(engine, prompts, params, None)
    policy = AnyDepths()
    decoder = engine.decoder
    assert isinstance(decoder, DeviceDecoder)
    monkeypatch.setattr(decoder, "_default_policy", lambda *_, **__: policy)
    for expected, result in zip(plain, records(engine, prompts, params), strict=True):
        assert result.output_ids == expected.output_ids
        assert result.logprobs == expected.logprobs
    ragged = [o for o in policy.outcomes if isinstance(o.shape, SequenceDepths)]
    assert len(ragged) > 10
    assert {d for o in ragged for d in o.depths} == set(range(CHAIN.draft_depth + 1))
    assert sum(sum(o.accepted) for o in ragged) > len(ragged)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ragged_steps_that_write_logits_change_no_token(
    engine: Engine, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight requests, of which some have penalties, top_p or top_logprobs.

    Another kernel computes log-probabilities in these steps, so their last bits may differ.
    """
    processors: list[dict[str, Any]] = [
        {},
        {"presence_penalty": 0.7, "frequency_penalty": 0.2},
        {"top_p": 0.9},
        {"repetition_penalty": 1.2, "logit_bias": {5: 1.5}},
    ]
    texts = example_prompts()
    prompts = [texts[i % len(texts)] for i in range(8)]
    params = [
        GenerateParams(
            max_new_tokens=TOKENS,
            sampling=SamplingParams(temperature, seed=i, **processors[i % 4]),
            top_logprobs=3 * (i % 2),
        )
        for i in range(8)
    ]
    plain = records(engine, prompts, params, None)
    policy = AnyDepths()
    monkeypatch.setattr(engine.decoder, "_default_policy", lambda *_, **__: policy)
    for expected, result in zip(plain, records(engine, prompts, params), strict=True):
        assert result.output_ids == expected.output_ids
        assert [[t for t, _ in top] for top in result.top_logprobs or ()] == [
            [t for t, _ in top] for top in expected.top_logprobs or ()
        ]
    ragged = [o for o in policy.outcomes if isinstance(o.shape, SequenceDepths)]
    assert sum(o.step_context.full_logits for o in ragged) > 10
    assert sum(sum(o.accepted) for o in ragged) > 0


@pytest.mark.speed
def test_ragged_steps_are_measured_and_selected(engine: Engine) -> None:
    costs = measure_step_costs(engine, print, budget_s=10.0, repeats=3)
    assert costs.ragged_shapes() == (RAGGED,)
    assert costs.batches(RAGGED) == [4, 8]
    tuned = Engine(engine.manifest, engine.executor, text=engine.text, step_costs=costs)
    prompts = (example_prompts() * 8)[:8]
    params = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    plain = records(engine, prompts, params, None)
    for expected, result in zip(plain, records(tuned, prompts, params), strict=True):
        assert (result.output_ids, result.logprobs) == (expected.output_ids, expected.logprobs)
