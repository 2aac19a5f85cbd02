"""Guided sequences in shared steps, on a device that runs as late as a GPU may.

A form is constructed along the decoding of an output. The tokens that it rejects, and the effect of
each mask, are therefore known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from left_out import examples, slow
from test_logit_changes import decode_by_definition
from toy_device import ToyCuda, toy_cuda
from toy_engine import CACHING_ALL, ON_DEMAND, run
from toy_language import LETTERS, Language, decode_masked, guided_engine, knowing_letters
from toy_model import EOS, VOCAB, choose, target_logits

from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.guides.grammar import GuideState
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings

PROMPTS = [[1, 2, 3, 2, 9], [4] * 11, [7, 5], [8]]
SHAPES = [None, DraftShape(1, 3, 3), DraftShape(3, 4, 12)]
SOME = range(len(LETTERS))
# At one place of an output: every letter may come, all but the model's choice, this one alone, or
# another one alone.
FREE, REFUSED, FORCED, LED = "free", "refused", "forced", "led"
places = st.sampled_from([FREE, FREE, FREE, REFUSED, FORCED, LED])


def params_of(sampling: SamplingParams, **changes: object) -> GenerateParams:
    return GenerateParams(max_new_tokens=40, sampling=sampling, **changes)


def form(
    prompt: Sequence[int], sampling: SamplingParams, kinds: Sequence[str]
) -> tuple[Language, list[int], int]:
    """Return a form with these places, its output, and the number of rejected tokens."""
    tokens, steps, refusals = list(prompt), [], 0
    for state, kind in enumerate(kinds):
        scores = target_logits(tokens)
        best = choose(scores, sampling, len(tokens) - 1)[0]
        allowed = {
            FREE: [*SOME],
            REFUSED: [letter for letter in SOME if letter != best],
            FORCED: [best if best in SOME else 0],
            LED: [(best + 5) % len(LETTERS)],
        }[kind]
        refusals += best not in allowed
        steps.append(dict.fromkeys(allowed, state + 1))
        masked = np.full(VOCAB, -1e30, np.float32)
        masked[allowed] = scores[allowed]
        tokens.append(choose(masked, sampling, len(tokens) - 1)[0])
    return Language((*steps, {}), frozenset({len(steps)})), tokens[len(prompt) :], refusals


def started(toy: ToyCuda) -> tuple[int, int]:
    """Return the steps without a mask, and the masked ones. Both are ordinary steps."""
    steps = [name for name in toy.device.started if name.startswith("step")]
    assert not any("adjusted" in name for name in steps)
    return len(steps) - toy.device.masked_steps, toy.device.masked_steps


@examples(10)
@example([[REFUSED] * 12, [FREE] * 12], 0.0, 1, SHAPES[1], 2, True)
@example([[REFUSED] * 12, [FREE] * 12], 0.0, 1, SHAPES[1], 2, False)
@example(
    [[FREE, FREE, LED, FREE, FREE, FREE, REFUSED, FREE, FORCED]] * 2, 0.9, 2, SHAPES[2], 1, True
)
@example([[LED] * 10 + [FREE] * 10, [FREE] * 5], 0.9, 3, None, 1, True)
@given(
    st.lists(st.lists(places, min_size=1, max_size=20), min_size=2, max_size=2),
    st.sampled_from([0.0, 0.9]),
    st.integers(0, 2**31 - 1),
    st.sampled_from(SHAPES),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_rejection_anywhere_gives_the_tokens_of_masked_decoding(
    kinds: list[list[str]],
    temperature: float,
    seed: int,
    shape: DraftShape | None,
    turns: int,
    shared: bool,
) -> None:
    """Other sequences have no form, or change their logits.

    ``shared``: ordinary steps mask roots. Otherwise, on an older engine, separate steps do.
    """
    sampling = SamplingParams(temperature, seed=seed)
    forms = [form(prompt, sampling, each) for prompt, each in zip(PROMPTS, kinds, strict=False)]
    schedule = PrefillSchedule(max_rows=4, steps_between=turns)
    toy = toy_cuda(RuntimeSettings(prefill=schedule), drafted_processors=shared)
    plain = replace(params_of(sampling), max_new_tokens=14)
    penalised = replace(plain, sampling=replace(sampling, presence_penalty=0.5))
    guided = [params_of(sampling, guide=language.guide) for language, _, _ in forms]
    each = [guided[0], plain, guided[1], penalised]
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[1], PROMPTS[3]]
    ran = run(knowing_letters(toy.engine), prompts, each, speculation=shape)
    assert [ran.ids[0], ran.ids[2]] == [output for _, output, _ in forms]
    assert ran.ids[1] == decode_by_definition(prompts[1], plain)
    assert ran.ids[3] == decode_by_definition(prompts[3], penalised)
    for place, (language, output, _) in zip((0, 2), forms, strict=True):
        assert output == decode_masked(prompts[place], each[place], language)
        assert ran.records[place].finish_reason == "stop"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("place", [1, 4, 9, *slow(2, 3, 5, 6, 7, 8)])
def test_one_rejection_costs_one_masked_step(place: int, shape: DraftShape | None) -> None:
    kinds = [FREE] * 24
    kinds[place] = REFUSED
    sampling = next(
        sampling
        for seed in range(100)
        for sampling in (SamplingParams(0.9, seed=seed),)
        if form(PROMPTS[0], sampling, kinds)[2] == 1
    )
    language, output, _ = form(PROMPTS[0], sampling, kinds)
    toy = toy_cuda()
    guided = params_of(sampling, guide=language.guide)
    ran = run(knowing_letters(toy.engine), PROMPTS[:1], guided, speculation=shape)
    assert ran.ids == [output]
    assert started(toy)[1] == 1 == ran.records[0].stats.masked_tokens


@pytest.mark.parametrize("shape", SHAPES)
def test_a_guide_without_rejections_costs_no_step(shape: DraftShape | None) -> None:
    kinds = [FREE, FREE, FORCED, FREE] * 6
    seed = next(
        s for s in range(100) if not form(PROMPTS[0], SamplingParams(0.9, seed=s), kinds)[2]
    )
    sampling = SamplingParams(0.9, seed=seed)
    language, output, _ = form(PROMPTS[0], sampling, kinds)
    plain = replace(params_of(sampling), max_new_tokens=len(output))
    with_form, without = toy_cuda(), toy_cuda()
    guided = params_of(sampling, guide=language.guide)
    ran = run(knowing_letters(with_form.engine), PROMPTS[:1], guided, speculation=shape)
    alone = run(without.engine, PROMPTS[:1], plain, speculation=shape)
    assert ran.ids == alone.ids == [output]
    assert started(with_form)[1] == 0 == ran.records[0].stats.masked_tokens
    ours, theirs = ran.records[0].stats, alone.records[0].stats
    # Steps in flight at the end do not know that the sequence has ended.
    assert ours.steps == theirs.steps
    assert ours.acceptance_histogram == theirs.acceptance_histogram


def test_a_model_that_ignores_the_guide_uses_masked_steps() -> None:
    language, output, refusals = form(PROMPTS[0], SamplingParams(), [LED] * 36)
    assert refusals == 36
    toy = toy_cuda()
    guided = params_of(SamplingParams(), guide=language.guide)
    ran = run(knowing_letters(toy.engine), PROMPTS[:1], guided, speculation=SHAPES[1])
    assert ran.ids == [output]
    together, masked = started(toy)
    # The first token is masked behind the prompt. Behind the refusals are 1, 2, 4, 8, 16 steps, and
    # with each refusal go the step in which it was found and the one behind it.
    assert masked == 35 and together <= 2 * 6
    assert ran.records[0].stats.masked_tokens == masked


def test_a_draft_has_programs_for_the_rows_up_to_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three sequences have no programs with this draft, and two in the rows 0 and 2 neither.

    The sequence between them waits for its mask.
    """
    for name in ("DRAFT_SHARE", "LEVEL_SHARE"):
        monkeypatch.setattr(f"specbuild.runtime.draft.device_costs.{name}", 0.0)
    kinds = [FREE, FREE, REFUSED, FREE, REFUSED, FREE, FREE, REFUSED] * 3
    sampling = SamplingParams()
    language, output, _ = form(PROMPTS[0], sampling, kinds)
    toy = toy_cuda(max_batch_size=4, shapes=SHAPES[1:2], without="step@4.1-3-3")
    plain, guided = params_of(sampling), params_of(sampling, guide=language.guide)
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[2]]
    ran = run(knowing_letters(toy.engine), prompts, [plain, guided, plain])
    assert ran.ids[1] == output
    assert ran.ids[0] == decode_by_definition(PROMPTS[1], plain)
    assert ran.ids[2] == decode_by_definition(PROMPTS[2], plain)
    assert any(name.startswith("step@2.1-3-3") for name in toy.device.started)


def test_sampling_is_free_after_the_end_of_a_guide() -> None:
    """Keys that the model would not generate; between them nothing is masked."""
    kinds = ([LED] * 6 + [FREE] * 12) * 3
    sampling = next(
        sampling
        for seed in range(300)
        for sampling in (SamplingParams(0.9, seed=seed),)
        if form(PROMPTS[0], sampling, kinds)[2] == 18
    )
    language, output, _ = form(PROMPTS[0], sampling, kinds)
    toy = toy_cuda()
    guided = replace(params_of(sampling, guide=language.guide), max_new_tokens=58)
    ran = run(knowing_letters(toy.engine), PROMPTS[:1], guided, speculation=None)
    assert ran.ids == [output]
    assert 12 <= started(toy)[1] <= 18


def test_a_rejected_end_token_does_not_end_the_sequence() -> None:
    """The device counts the sequence as done, and resumes it."""
    kinds = [FREE] * 20
    seed = next(
        s
        for s in range(200)
        if 3 < len(decode_by_definition(PROMPTS[0], params_of(SamplingParams(0.9, seed=s)))) < 10
    )
    sampling = SamplingParams(0.9, seed=seed)
    language, output, refusals = form(PROMPTS[0], sampling, kinds)
    assert refusals and EOS not in output
    guided = params_of(sampling, guide=language.guide)
    for shape in SHAPES:
        ran = run(knowing_letters(toy_cuda().engine), PROMPTS[:1], guided, speculation=shape)
        assert ran.ids == [output]


def test_a_step_asks_the_guide_once_for_each_sequence() -> None:
    """The check of a step's tokens also tells which tokens are forced, and whether any may follow.

    Each call of the guide takes the host microseconds, which the device may have to wait for.
    """
    kinds = [FREE] * 20
    sampling = next(
        sampling
        for seed in range(1000)
        if not form(PROMPTS[0], sampling := SamplingParams(0.9, seed=seed), kinds)[2]
    )
    language, output, _ = form(PROMPTS[0], sampling, kinds)
    toy, calls = toy_cuda(), Counter[str]()
    with ExitStack() as patches:
        for name in ("check", "complete", "forced", "allows"):
            method = getattr(GuideState, name)

            def counted(*args: object, name: str = name, method=method) -> object:
                calls[name] += 1
                return method(*args)

            patches.enter_context(patch.object(GuideState, name, counted))
        guided = params_of(sampling, guide=language.guide)
        ran = run(knowing_letters(toy.engine), PROMPTS[:1], guided, speculation=None)
    assert ran.ids == [output]
    # The first token comes from the prompt, with a mask.
    assert calls["check"] == len(output) - 1
    assert calls["complete"] + calls["forced"] + calls["allows"] <= 4


def recorded_pairs(toy: ToyCuda) -> dict[int, tuple[int, float]]:
    """Return the token and the state of each position's last entry in the draft's cache."""
    pairs: dict[int, tuple[int, float]] = {}
    inner, size = toy.device._draft, toy.device.manifest.group("draft").page_size

    def draft(ids, hidden, positions, places, write) -> tuple[torch.Tensor, torch.Tensor]:
        rows = zip(*(t.tolist() for t in (ids, hidden[:, 0], positions, write)), strict=True)
        for token, state, position, slot in rows:
            if slot >= size:
                pairs[position] = (token, state)
        return inner(ids, hidden, positions, places, write)

    toy.device._draft = draft
    return pairs


@examples(8)
@example([FREE, FREE, REFUSED, FREE, FREE, FREE, FREE, LED, LED, LED, FREE, FREE], 1, SHAPES[1])
@example([FREE, REFUSED, *[FREE] * 6], 37, SHAPES[1])  # an end of sequence is refused
@given(st.lists(places, min_size=8, max_size=24), st.integers(0, 1000), st.sampled_from(SHAPES[1:]))
def test_the_cache_of_the_draft_has_the_emitted_tokens(
    kinds: list[str], seed: int, shape: DraftShape
) -> None:
    """As if the output had been a prompt: h_t with the token that follows it."""
    sampling = SamplingParams(0.9, seed=seed)
    language, output, _ = form(PROMPTS[0], sampling, kinds)
    toy, reader = toy_cuda(), toy_cuda()
    found, wanted = recorded_pairs(toy), recorded_pairs(reader)
    guided = params_of(sampling, guide=language.guide)
    assert run(knowing_letters(toy.engine), PROMPTS[:1], guided, speculation=shape).ids == [output]
    one = replace(params_of(SamplingParams()), max_new_tokens=1)
    run(reader.engine, [[*PROMPTS[0], *output]], one, speculation=None)
    # The draft has not ingested the token of the last step.
    held = len(PROMPTS[0]) + len(output) - shape.draft_depth - 2
    assert {t: found[t] for t in range(held)} == {t: wanted[t] for t in range(held)}


@pytest.mark.parametrize("shape", SHAPES)
def test_few_pages_change_nothing(shape: DraftShape | None) -> None:
    sampling = SamplingParams(0.9, seed=5)
    kinds = [FREE, REFUSED, FREE, FREE, LED, FREE, FREE, FREE, FORCED, REFUSED] * 3
    forms = [form(prompt, sampling, kinds) for prompt in PROMPTS[:3]]
    each = [params_of(sampling, guide=language.guide) for language, _, _ in forms]
    engine = knowing_letters(toy_cuda(ON_DEMAND, kv_pages=22).engine)
    few = run(engine, PROMPTS[:3], each, speculation=shape)
    assert few.ids == [output for _, output, _ in forms]
    assert sum(record.stats.preemptions for record in few.records) > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_published_pages_end_before_rejected_tokens(shape: DraftShape | None) -> None:
    sampling = SamplingParams(0.9, seed=2)
    kinds = [FREE, FREE, REFUSED, FREE, LED, FREE, FREE, FREE] * 4
    language, output, refusals = form(PROMPTS[0], sampling, kinds)
    assert refusals > 6
    warm, cold = knowing_letters(toy_cuda(CACHING_ALL).engine), toy_cuda().engine
    guided = params_of(sampling, guide=language.guide)
    for _ in range(2):
        assert run(warm, PROMPTS[:1], guided, speculation=shape).ids == [output]
    longer, plain = [[*PROMPTS[0], *output, 3]], params_of(SamplingParams())
    hit = run(warm, longer, plain, speculation=SHAPES[1]).records[0]
    alone = run(cold, longer, plain, speculation=SHAPES[1]).records[0]
    # The draft needs pages too.
    assert (hit.stats.cached_tokens > len(PROMPTS[0]) + 8) == (shape is not None)
    assert hit.output_ids == alone.output_ids
    assert hit.stats.acceptance_histogram == alone.stats.acceptance_histogram
    warm.prefixes.check_integrity()


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_before_a_failure_are_emitted(shape: DraftShape | None) -> None:
    # No token of the vocabulary is a space.
    stuck = GenerateParams(max_new_tokens=30, guide=Guide.regex("[a-z]{9} d"))
    ran = run(knowing_letters(toy_cuda().engine), PROMPTS[:1], stuck, speculation=shape)
    alone = run(guided_engine(), PROMPTS[:1], stuck, speculation=None)
    assert ran.records[0].finish_reason == alone.records[0].finish_reason == "guide_failed"
    assert ran.ids == alone.ids and len(ran.ids[0]) >= 9


def test_an_older_engine_masks_every_step() -> None:
    """Its masked steps do not let the draft ingest. Without a draft only some steps are masked."""
    language, output, _ = form(PROMPTS[0], SamplingParams(), [FREE] * 12)
    guided = params_of(SamplingParams(), guide=language.guide)
    older = partial(toy_cuda, without="adjusted.extends", drafted_processors=False)
    for shape, masks_all in ((SHAPES[1], True), (None, False)):
        toy = older()
        ran = run(knowing_letters(toy.engine), PROMPTS[:1], guided, speculation=shape)
        assert ran.ids == [output]
        steps = [name for name in toy.device.started if name.startswith("step")]
        masked = sum("adjusted" in name for name in steps)
        assert (masked == len(steps)) == masks_all and (masked == 11) == masks_all
