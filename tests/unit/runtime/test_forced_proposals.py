"""Chains of forced tokens of a guide, on a device that runs as late as a GPU may.

The forms are those of ``test_guide_checks``, which know the tokens that they reject.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from left_out import examples
from test_device_host_proposals import CHAIN, LIMITS, LONGEST, RECORD, Mixed, mixed, offering
from test_guide_checks import (
    FORCED,
    FREE,
    LED,
    PROMPTS,
    REFUSED,
    form,
    params_of,
    places,
    recorded_pairs,
)
from test_logit_changes import decode_by_definition
from toy_device import toy_cuda
from toy_engine import run
from toy_language import knowing_letters
from toy_plan import SHAPES

from specbuild.runtime.decode.device.stepper import DeviceStepper
from specbuild.runtime.draft.host_proposal import ProposedDepths
from specbuild.runtime.draft.policy import no_draft_policy
from specbuild.runtime.draft.proposal_policy import UnmeasuredProposals
from specbuild.runtime.engine_dir.plan import FORCED_ROWS
from specbuild.runtime.guides.grammar import GuideState
from specbuild.runtime.sampling import SamplingParams


def kinds_of(places: Sequence[str], run_length: int) -> list[str]:
    """Return the kind of each place, with runs of forced ones."""
    return [kind for place in places for kind in [place] * (run_length if place == LED else 1)]


@examples(10)
@example([[LED, FREE, LED], [FREE, FORCED, REFUSED, FREE]], 5, 0.9, 1, 3, True, 1.0)
@example([[FREE, LED, FREE, LED], [LED]], 14, 0.0, 1, 7, False, 1.0)
# The guide refuses the token after a chain that is longer than the draft's buffer.
@example([[LED], [FREE]], 10, 0.0, 0, 185477, True, 0.7)
@given(
    st.lists(st.lists(places, min_size=1, max_size=10), min_size=2, max_size=2),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.9]),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**31 - 1),
    st.booleans(),
    st.sampled_from([0.3, 0.7, 1.0]),
)
def test_any_order_of_steps_has_the_tokens_of_masked_decoding(
    kinds: list[list[str]],
    run_length: int,
    temperature: float,
    seed: int,
    order: int,
    drafted: bool,
    offers: float,
) -> None:
    """Forced chains, suffix decoding of another sequence, drafts, and steps without any."""
    sampling = SamplingParams(temperature, seed=seed)
    forms = [
        form(prompt, sampling, kinds_of(each, run_length)[:38])
        for prompt, each in zip(PROMPTS, kinds, strict=False)
    ]
    plain = replace(params_of(sampling), max_new_tokens=20)
    penalised = replace(plain, sampling=replace(sampling, presence_penalty=0.5))
    guided = [params_of(sampling, guide=language.guide) for language, _, _ in forms]
    guided[1] = replace(guided[1], top_logprobs=2)
    each = [guided[0], plain, guided[1], penalised]
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[1], PROMPTS[3]]
    expected = [
        forms[0][1],
        decode_by_definition(prompts[1], plain),
        forms[1][1],
        decode_by_definition(prompts[3], penalised),
    ]
    policy = Mixed(seed=order, offers=offers, shapes=[None, *SHAPES] if drafted else [None])
    outputs = {tuple(ids): tokens for ids, tokens in zip(prompts, expected, strict=True)}
    toy, knowing = mixed(policy, outputs, drafted=drafted, errors=0.2)
    ran = run(knowing_letters(toy.engine), prompts, each)
    assert ran.ids == expected
    for place in (0, 2):
        assert ran.records[place].finish_reason == "stop"
    assert [len(top) for top in ran.records[2].top_logprobs or ()] == [2] * len(expected[2])
    for depth, accepted in knowing.offered:
        assert 0 <= accepted <= depth <= LONGEST


@pytest.mark.parametrize("guides_alone", [False, True])
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_forced_tokens_need_one_step(temperature: float, drafted: bool, guides_alone: bool) -> None:
    """Whatever the model would choose, and with no mask of the tokens in between."""
    kinds = ([FREE] * 3 + [LED] * 8) * 3
    sampling = SamplingParams(temperature, seed=5)
    language, output, _ = form(PROMPTS[0], sampling, kinds)
    toy = offering(drafted=drafted, guides_alone=guides_alone)
    if guides_alone and drafted:
        toy.engine.decoder._default_policy = lambda _, **__: UnmeasuredProposals(
            no_draft_policy(), max_chain=LONGEST
        )
    forced: list[int] = []
    inner = toy.device._step

    def step(entry) -> None:
        if int(toy.device.port("changes")[0]) & FORCED_ROWS and entry.host_proposal:
            forced.append(int(toy.device.port("forced")[0]))
        inner(entry)

    toy.device._step = step
    guided = params_of(sampling, guide=language.guide)
    drafter = "auto" if guides_alone else "suffix"
    ran = run(knowing_letters(toy.engine), PROMPTS[:1], guided, drafter=drafter)
    assert ran.ids == [output]
    assert len(forced) >= 3 and sum(forced) >= 18
    assert ran.records[0].stats.steps < 22
    alone = run(knowing_letters(toy_cuda().engine), PROMPTS[:1], guided, speculation=None)
    assert alone.ids == [output] and alone.records[0].stats.steps >= 30


@pytest.mark.parametrize("drafted", [False, True])
def test_forced_tokens_wait_for_no_step(drafted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain starts while a step is in flight, whose token of this sequence is discarded."""
    kinds = ([FREE] * 3 + [LED] * 6) * 3
    sampling = SamplingParams(0.9, seed=7)
    language, output, _ = form(PROMPTS[0], sampling, kinds)
    in_flight: list[int] = []
    start = DeviceStepper.start

    def started(stepper: DeviceStepper, sequences, shape, step_context) -> None:
        if isinstance(shape, ProposedDepths):
            in_flight.append(stepper.in_flight)
        start(stepper, sequences, shape, step_context)

    monkeypatch.setattr(DeviceStepper, "start", started)
    toy = toy_cuda(suffix=RECORD, limits=LIMITS, shapes=[CHAIN], drafted=drafted, max_batch_size=4)
    policy = UnmeasuredProposals(no_draft_policy(), max_chain=LONGEST)
    toy.engine.decoder._default_policy = lambda _, **__: policy
    guided = params_of(sampling, guide=language.guide)
    ran = run(knowing_letters(toy.engine), PROMPTS[:1], guided)
    assert ran.ids == [output]
    assert in_flight.count(1) >= 2
    assert ran.records[0].stats.steps < len(output) - 6


def test_the_buffer_of_the_draft_is_full_again_after_a_refused_end() -> None:
    """The step in flight ingests nothing of a sequence that has ended, even if its end is refused.

    The toy refuses to read what the draft would then never ingest.
    """
    sampling = SamplingParams(0.9, seed=4)
    language, output, _ = form(PROMPTS[0], sampling, ([FREE] * 7 + [LED] * 9) * 2 + [FREE] * 3)
    toy = toy_cuda(suffix=replace(RECORD, max_tokens=3), shapes=[CHAIN], guides_alone=True)
    policy = UnmeasuredProposals(no_draft_policy(), max_chain=3)
    toy.engine.decoder._default_policy = lambda _, **__: policy
    guided = params_of(sampling, guide=language.guide)
    assert run(knowing_letters(toy.engine), PROMPTS[:1], guided).ids == [output]


def test_masks_are_computed_after_rejections_only() -> None:
    """A mask takes the host longer than the rest of a step, so chains have none."""
    kinds, led = ([FREE] * 2 + [LED] * 6) * 3, 18
    forms = (form(PROMPTS[0], SamplingParams(0.9, seed=seed), kinds) for seed in range(1000))
    seed, (language, output, _) = next(
        (seed, each) for seed, each in enumerate(forms) if each[2] == led
    )
    guided = params_of(SamplingParams(0.9, seed=seed), guide=language.guide)
    toy = offering(drafted=False)
    with patch.object(GuideState, "mask", autospec=True, side_effect=GuideState.mask) as masks:
        ran = run(knowing_letters(toy.engine), PROMPTS[:1], guided)
    assert ran.ids == [output]
    # The first token, which the prompt's launch samples, has one.
    assert {len(call.args[1]) for call in masks.call_args_list} == {0}


def test_refused_forced_tokens_need_no_mask_of_a_choice() -> None:
    """The model misses every forced token, and all of its choices are allowed."""
    kinds = ([FREE] * 3 + [LED] + [FREE] * 2 + [LED] * 5) * 3
    forms = (form(PROMPTS[0], SamplingParams(0.9, seed=seed), kinds) for seed in range(2000))
    seed, (language, output, _) = next(
        (seed, each) for seed, each in enumerate(forms) if each[2] == kinds.count(LED)
    )
    guided = params_of(SamplingParams(0.9, seed=seed), guide=language.guide)
    toy = offering(drafted=False)
    with patch.object(GuideState, "mask", autospec=True, side_effect=GuideState.mask) as masks:
        ran = run(knowing_letters(toy.engine), PROMPTS[:1], guided)
    assert ran.ids == [output]
    places = {len(call.args[1]) for call in masks.call_args_list}
    assert {kinds[place] for place in places - {0}} <= {LED}


@examples(6)
@example([FREE, FREE, LED, FREE, FREE, REFUSED, LED, FREE, FREE, FREE], 6, 1, 11)
@given(
    st.lists(places, min_size=8, max_size=16),
    st.integers(2, 9),
    st.integers(0, 1000),
    st.integers(0, 1000),
)
def test_the_cache_of_the_draft_has_the_emitted_tokens(
    kinds: list[str], run_length: int, seed: int, order: int
) -> None:
    """As if the output had been a prompt, even if chains exceed the pending buffer."""
    sampling = SamplingParams(0.9, seed=seed)
    language, output, _ = form(PROMPTS[0], sampling, kinds_of(kinds, run_length)[:38])
    policy = Mixed(seed=order, offers=0.7, shapes=[None, CHAIN])
    toy, _ = mixed(policy, {tuple(PROMPTS[0]): output}, drafted=True, errors=0.0)
    reader = toy_cuda()
    found, wanted = recorded_pairs(toy), recorded_pairs(reader)
    guided = params_of(sampling, guide=language.guide)
    assert run(knowing_letters(toy.engine), PROMPTS[:1], guided).ids == [output]
    one = replace(params_of(SamplingParams()), max_new_tokens=1)
    run(reader.engine, [[*PROMPTS[0], *output]], one, speculation=None)
    # The draft has not ingested the tokens of the last steps.
    held = len(PROMPTS[0]) + len(output) - LONGEST - 3
    assert {t: found[t] for t in range(held)} == {t: wanted[t] for t in range(held)}


def test_older_engines_propose_nothing_to_guided_sequences() -> None:
    kinds = ([FREE] * 3 + [LED] * 8) * 2
    language, output, _ = form(PROMPTS[0], SamplingParams(), kinds)
    toy = offering(drafted=False, drafted_processors=False)
    guided = params_of(SamplingParams(), guide=language.guide)
    ran = run(knowing_letters(toy.engine), PROMPTS[:1], guided, drafter="suffix")
    assert ran.ids == [output]
    assert not any("offered" in name for name in toy.device.started)
