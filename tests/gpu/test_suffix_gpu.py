"""Suffix decoding on a GPU: host proposals change no bit, alone and with a draft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from example_engine import EXAMPLE, build_example, example_prompts, on_gpu, outputs, records
from synthetic_models import LEVELS, MAX_SEQ_LEN, OUTPUT_TOKENS, successors, tiny
from test_sampling_fields_gpu import GUIDES

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.synth import build_engine
from specbuild.runtime.decode.device.decoder import DeviceDecoder
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.host_proposal import WAIT_FOR_TOKENS, ProposedDepths, WaitForTokens
from specbuild.runtime.draft.policy import ChosenDraft, StepOutcome
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.measure.step_measurement import measure_step_costs
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

CHAIN = DraftShape(1, LEVELS, LEVELS)


@pytest.fixture(scope="module", params=["alone", "beside"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """The example with suffix decoding, without its draft and with it."""
    output = tmp_path_factory.mktemp("suffix") / request.param
    if request.param == "beside":
        build_example(output, CHAIN, drafter="suffix", max_batch_size=4)
    else:
        options = BuildOptions.from_flat(
            model=EXAMPLE / "target",
            output=output,
            backend="cuda",
            max_seq_len=1024,
            max_batch_size=8,
            drafter="suffix",
        )
        build(options, SilentProgress())
    with on_gpu(output) as loaded:
        yield loaded


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_drafts_change_no_bit(engine: Engine, count: int, temperature: float) -> None:
    """Up to eight sequences run together, four with a draft; others join as these end."""
    texts = example_prompts()
    prompts = [texts[i % len(texts)] for i in range(count)]
    expected = [
        GenerateParams(
            max_new_tokens=48 + 37 * i % 150,
            sampling=SamplingParams(temperature, seed=i),
            ignore_eos=True,
        )
        for i in range(count)
    ]
    plain = outputs(records(engine, prompts, expected, drafter="none"))
    steps = []
    # From the second run on, the answers are known.
    for drafter in ("suffix", "suffix", "auto", "auto"):
        results = records(engine, prompts, expected, drafter=drafter)
        assert outputs(results) == plain
        steps.append(sum(record.stats.steps for record in results))
    assert steps[1] < 0.7 * sum(len(ids) for ids, _ in plain)
    assert engine.decoder.host_statistics["suffix"].cached_accepted_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_forced_chains_give_the_tokens_of_masked_decoding(
    engine: Engine, temperature: float
) -> None:
    """The keys of a schema are proposed, and accepted whatever the model would select."""
    pytest.importorskip("llguidance")
    params_of_request = GenerateParams(
        max_new_tokens=160, sampling=SamplingParams(temperature, seed=11), guide=GUIDES["schema"]
    )
    prompts = example_prompts()[:4]
    with patch.object(GenerateParams, "checks_guide", new=False):
        expected = [
            records(engine, [prompt], params_of_request, drafter="none")[0] for prompt in prompts
        ]
    alone = [
        records(engine, [prompt], params_of_request, drafter="suffix")[0] for prompt in prompts
    ]
    together = records(engine, prompts, params_of_request, drafter="suffix")
    for result in (alone, together):
        for actual, desired in zip(result, expected, strict=True):
            assert actual.output_ids == desired.output_ids
            np.testing.assert_allclose(actual.logprobs, desired.logprobs, atol=1e-4)
    steps = sum(record.stats.steps for record in alone)
    tokens = sum(len(record.output_ids) for record in alone)
    print(f"{tokens} tokens in {steps} steps")
    assert steps < 0.8 * tokens


def test_programs_with_host_proposals_are_measured(engine: Engine) -> None:
    costs = measure_step_costs(engine, print, budget_s=5.0, repeats=2)
    times = [
        costs.step_s(DraftShape(1, n, n), batch=1, context=64, host_proposal=True)
        for n in (3, 7, 15, 24)
    ]
    assert all(time is not None and 0 < time < 1 for time in times)


class Alternating:
    """A host proposal, then some chains of the draft, repeatedly; records the results."""

    max_depth, reason = 24, "alternating"

    def __init__(self) -> None:
        self.outcomes: list[StepOutcome] = []
        self._turn = 0

    def shape(self, step_context: StepContext) -> ChosenDraft | WaitForTokens:
        if step_context.has_unread_tokens:
            return WAIT_FOR_TOKENS
        self._turn += 1
        depths = tuple(map(len, step_context.cumulative_probs))
        if self._turn % 4 == 0 and any(depths):
            return ProposedDepths(depths)
        return CHAIN

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


def test_the_draft_follows_its_rules_after_a_long_host_proposal(tmp_path: Path) -> None:
    """Its cache has a row for every token, whatever proposed it."""
    model = tiny(0.6)
    options = BuildOptions(
        model=Path("tiny"),
        output=tmp_path / "engine",
        backend="cuda",
        limits=LimitOptions(max_seq_len=2 * MAX_SEQ_LEN, max_batch_size=1),
        drafting=DraftOptions(top_k=1, tokens=LEVELS),
        drafter="suffix",
    )
    build_engine(model, options, SilentProgress())
    target, draft = successors(model)
    [ids] = model.prompts()[:1]
    text = list(ids)
    while len(text) < len(ids) + OUTPUT_TOKENS:
        text.append(target[text[-1]])
    # The prompt contains its own answer, so every continuation occurred before.
    prompt = Prompt("again", (*text, *ids), None)
    with on_gpu(options.output) as engine:
        assert isinstance(engine.decoder, DeviceDecoder)
        policy = Alternating()
        engine.decoder._default_policy = lambda _, **__: policy
        [record] = records(engine, [prompt], [GenerateParams(OUTPUT_TOKENS)], drafter="auto")
    place, met, longest = 1, 0, 0
    for outcome in policy.outcomes:
        accepted, root = outcome.accepted[0], record.output_ids[place - 1]
        if outcome.shape == CHAIN and place + LEVELS < OUTPUT_TOKENS:
            expected, token = 0, root
            while expected < LEVELS and draft[token] == target[token]:
                expected, token = expected + 1, target[token]
            assert accepted == expected
            met += 1
        elif isinstance(outcome.shape, ProposedDepths):
            longest = max(longest, accepted)
        place += accepted + 1
    assert met > 5 and longest > LEVELS + 1
    assert list(record.output_ids) == text[len(ids) : len(ids) + len(record.output_ids)]
