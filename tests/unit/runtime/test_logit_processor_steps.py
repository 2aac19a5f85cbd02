"""Logit processors in steps on a device: expected tokens, and unchanged neighbours.

Requests without a guide share steps and drafts with other requests. With a guide, and on older
engines, they have separate steps. The device is the toy's, which runs as late as a GPU may. The
references are those of the host.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from left_out import examples
from test_logit_changes import decode_by_definition
from test_logit_changes import samplings as changing
from toy_device import toy_cuda
from toy_engine import CACHING_ALL, ON_DEMAND, prompt, run, toy_engine
from toy_language import Language, decode_masked, guided_engine, knowing_letters, languages
from toy_model import EOS

from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings

PROMPTS = [[1, 2, 3, 2, 9], [4] * 11, [7, 5], [8]]
SHAPES = [None, DraftShape(1, 3, 3), DraftShape(3, 4, 12)]
LINE = Language(({0: 1}, {1: 2}, {2: 3, 3: 3}, {4: 0, 5: 4}, {}), frozenset({4}))
# The mask of the first token allows fewer tokens than the later masks.
WIDENING = Language(({0: 1}, dict.fromkeys(range(28), 1)), frozenset({1}))
PLAIN = GenerateParams(max_new_tokens=16, sampling=SamplingParams(0.8, seed=3), ignore_eos=True)


@examples(8)
@example(SamplingParams(logit_bias={EOS: 100}), 5, SHAPES[1], True)
@example(SamplingParams(0.8, frequency_penalty=1.5, min_p=0.3), 0, SHAPES[2], True)
@example(SamplingParams(repetition_penalty=1.7, presence_penalty=1.0), 3, SHAPES[2], True)
@example(SamplingParams(0.8, frequency_penalty=1.5, min_p=0.3), 0, SHAPES[2], False)
@given(changing, st.integers(0, 12), st.sampled_from(SHAPES), st.booleans())
def test_tokens_equal_the_definition(
    sampling: SamplingParams, least: int, shape: DraftShape | None, drafted: bool
) -> None:
    params = GenerateParams(
        max_new_tokens=12, sampling=sampling, min_tokens=least, stop_token_ids=(6,)
    )
    plain = GenerateParams(max_new_tokens=12, sampling=SamplingParams(sampling.temperature, seed=3))
    each = [params, plain, params, plain]
    toy = toy_cuda(drafted_processors=drafted)
    decoded = run(toy.engine, PROMPTS, each, speculation=shape).ids
    assert not (drafted and any("adjusted" in name for name in toy.device.started))
    assert decoded == [decode_by_definition(*pair) for pair in zip(PROMPTS, each, strict=True)]


@settings(max_examples=6, deadline=None)
@example(LINE, SamplingParams(), SHAPES[1], False)
@example(LINE, SamplingParams(0.9, top_k=3, seed=5), SHAPES[2], False)
@example(WIDENING, SamplingParams(0.9, seed=5), SHAPES[1], True)
@example(WIDENING, SamplingParams(), None, True)
@example(
    Language(({0: 0},), frozenset({0})), SamplingParams(0.9, frequency_penalty=0.7), None, False
)
@given(
    languages(),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.9]),
        seed=st.integers(0, 2**31 - 1),
        top_p=st.sampled_from([1.0, 0.7]),
        min_p=st.sampled_from([0.0, 0.2]),
        frequency_penalty=st.sampled_from([0.0, 0.7]),
    ),
    st.sampled_from(SHAPES),
    st.booleans(),
)
def test_guided_tokens_equal_masked_decoding(
    language: Language, sampling: SamplingParams, shape: DraftShape | None, beside: bool
) -> None:
    guided = GenerateParams(max_new_tokens=14, sampling=sampling, guide=language.guide)
    free = GenerateParams(max_new_tokens=14, sampling=SamplingParams(sampling.temperature, seed=3))
    if beside:
        # Steps that they share with another request apply logit processors.
        free = replace(free, sampling=replace(free.sampling, frequency_penalty=0.8))
    each, known = [guided, free, guided], [language, None, language]
    ran = run(knowing_letters(toy_cuda().engine), PROMPTS[:3], each, speculation=shape)
    assert ran.ids == [decode_masked(*of) for of in zip(PROMPTS[:3], each, known, strict=True)]
    assert ran.records[1].stats.masked_tokens is None
    for record in (ran.records[0], ran.records[2]):
        if record.finish_reason != "length":
            assert not language.allowed(record.output_ids)


def test_other_sequences_keep_tokens_and_drafts() -> None:
    """All requests share steps. Requests without logit processors keep their bits."""
    logprobs = replace(PLAIN, logprobs=True)
    biased = replace(PLAIN, sampling=SamplingParams(presence_penalty=0.5), top_logprobs=2)
    shape, prompts = SHAPES[2], [PROMPTS[0], PROMPTS[1]]
    lone, shared = toy_cuda(), toy_cuda()
    alone = run(lone.engine, prompts, logprobs, speculation=shape)
    each = [logprobs, logprobs, biased]
    beside = run(shared.engine, [*prompts, PROMPTS[2]], each, speculation=shape)
    assert beside.ids[:2] == alone.ids
    assert [record.logprobs for record in beside.records[:2]] == [r.logprobs for r in alone.records]
    for ours, theirs in zip(beside.records, alone.records, strict=False):
        assert ours.stats.acceptance_histogram == theirs.stats.acceptance_histogram
    assert beside.ids[2] == decode_by_definition(PROMPTS[2], biased)
    # It drafts, and keeps the likeliest tokens of every row of its paths.
    stats = beside.records[2].stats
    assert stats.steps < len(beside.ids[2]) - 1 == 15
    assert sum(stats.acceptance_histogram[1:]) > 0
    assert [len(top) for top in beside.records[2].top_logprobs or ()] == [2] * 16
    steps = [name for name in shared.device.started if name.startswith("step")]
    assert all(name.endswith("3-4-12.1") for name in steps)


def test_other_sequences_keep_tokens_drafts_and_programs_on_older_engines() -> None:
    biased = replace(PLAIN, sampling=SamplingParams(presence_penalty=0.5), top_logprobs=2)
    shape, prompts = SHAPES[2], [PROMPTS[0], PROMPTS[1]]
    lone, shared = (toy_cuda(drafted_processors=False) for _ in range(2))
    alone = run(lone.engine, prompts, PLAIN, speculation=shape)
    beside = run(shared.engine, [*prompts, PROMPTS[2]], [PLAIN, PLAIN, biased], speculation=shape)
    assert beside.ids[:2] == alone.ids
    assert [record.logprobs for record in beside.records[:2]] == [r.logprobs for r in alone.records]
    for ours, theirs in zip(beside.records, alone.records, strict=False):
        assert ours.stats.acceptance_histogram == theirs.stats.acceptance_histogram
    ran, plain = Counter(shared.device.started), Counter(lone.device.started)
    assert {name for name in ran if name.startswith("step") and "adjusted" not in name} == {
        name for name in plain if name.startswith("step")
    }
    assert not any("adjust" in name for name in plain)
    # After the others have finished, it is in the first row.
    assert ran["step@4.adjusted"] + ran["step@1.adjusted"] == 15 and ran["adjust"] == 1
    # They alternate as long as both have work.
    steps = [name for name in shared.device.started if name.startswith("step")]
    turns = "".join("a" if "adjusted" in name else "-" for name in steps)
    both = turns[turns.index("a") : turns.rindex("-")]
    assert len(both) > 12 and all(a != b for a, b in pairwise(both))


def test_prompts_that_end_in_one_launch_keep_their_bits() -> None:
    """Logit processors after a launch of prompts leave the rows of other requests unchanged."""
    biased = replace(PLAIN, sampling=SamplingParams(logit_bias={5: 9.0}))
    plain = replace(PLAIN, max_new_tokens=1)
    toy, alone = toy_cuda(), toy_cuda()
    for first in range(0, 24, 2):
        prompts = [[first], [7, 5], [first + 1]]
        beside = run(toy.engine, prompts, [plain, biased, plain], speculation=None).records
        assert toy.device.started[:2] == ["prefill@4", "adjust"]
        lone = run(alone.engine, prompts[::2], plain, speculation=None).records
        for ours, theirs in zip(beside[::2], lone, strict=True):
            assert (ours.output_ids, ours.logprobs) == (theirs.output_ids, theirs.logprobs)


def test_min_p_alone_keeps_its_draft() -> None:
    toy = toy_cuda()
    params = replace(PLAIN, sampling=SamplingParams(0.8, seed=9, min_p=0.3))
    ran = run(toy.engine, PROMPTS[:2], params, speculation=SHAPES[1])
    assert ran.ids == [decode_by_definition(ids, params) for ids in PROMPTS[:2]]
    assert any("adjust" not in name and "1-3-3.1" in name for name in toy.device.started)
    assert not any("adjust" in name for name in toy.device.started)
    assert sum(record.stats.steps for record in ran.records) < 2 * 15


def test_top_log_probabilities_equal_those_of_the_host() -> None:
    params = [
        replace(PLAIN, top_logprobs=count, sampling=SamplingParams(t, logit_bias=bias))
        for count, t, bias in ((3, 0.0, {}), (20, 0.9, {5: 3.0}), (0, 0.0, {}), (1, 0.0, {2: 1}))
    ]
    device = run(toy_cuda().engine, PROMPTS, params, speculation=SHAPES[1])
    host = run(toy_engine(), PROMPTS, params, speculation=None)
    assert device.ids == host.ids
    for ours, theirs in zip(device.records, host.records, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        assert (ours.top_logprobs is None) == (theirs.top_logprobs is None)
        for mine, other in zip(ours.top_logprobs or (), theirs.top_logprobs or (), strict=True):
            assert [token for token, _ in mine] == [token for token, _ in other]
            assert [p for _, p in mine] == pytest.approx([p for _, p in other], abs=1e-5)


@examples(10)
@example([0, 1, 2, 0], [1, 1, 3, 1, 1, 1, 1], 1, None)
@example([4, 1, 3, 4], [14, 9, 3, 12, 1, 1, 1], 1, SHAPES[2])
@given(
    st.lists(st.integers(0, 4), min_size=3, max_size=7),
    st.lists(st.integers(1, 14), min_size=7, max_size=7),
    st.integers(1, 3),
    st.sampled_from(SHAPES),
)
def test_sequences_that_join_and_leave_change_nothing(
    kinds: list[int], counts: list[int], turns: int, shape: DraftShape | None
) -> None:
    """Rows move while steps of both kinds are in flight."""
    toy = toy_cuda(RuntimeSettings(prefill=PrefillSchedule(max_rows=4, steps_between=turns)))
    penalised = SamplingParams(0.7, frequency_penalty=0.8, repetition_penalty=1.3, seed=11)
    of_kind = [
        PLAIN,
        replace(PLAIN, sampling=penalised, min_tokens=0),
        replace(PLAIN, sampling=SamplingParams(logit_bias={3: 4.0}), top_logprobs=2),
        replace(PLAIN, guide=LINE.guide, ignore_eos=False),
        replace(PLAIN, guide=WIDENING.guide, sampling=penalised, top_logprobs=3),
    ]
    each = [replace(of_kind[k], max_new_tokens=n) for k, n in zip(kinds, counts, strict=False)]
    prompts = [PROMPTS[i % 4] + [i] * (i % 3) for i in range(len(kinds))]
    device = run(knowing_letters(toy.engine), prompts, each, speculation=shape)
    host = [
        run(guided_engine(), [ids], p, speculation=None)
        for ids, p in zip(prompts, each, strict=True)
    ]
    assert device.ids == [ran.ids[0] for ran in host]
    for ours, theirs in zip(device.records, (ran.records[0] for ran in host), strict=True):
        assert ours.finish_reason == theirs.finish_reason
        lists = [[[t for t, _ in top] for top in r.top_logprobs or ()] for r in (ours, theirs)]
        assert lists[0] == lists[1]


def test_few_pages_change_nothing() -> None:
    """The device gets the state of a restored sequence again."""
    sampling = SamplingParams(1.0, frequency_penalty=0.9, repetition_penalty=1.2, seed=4)
    penalised = replace(PLAIN, max_new_tokens=30, sampling=sampling, top_logprobs=2)
    params = [penalised, replace(PLAIN, max_new_tokens=30), penalised]
    whole = run(toy_cuda().engine, PROMPTS[:3], params, speculation=SHAPES[1])
    engine = toy_cuda(ON_DEMAND, kv_pages=22).engine
    few = run(engine, PROMPTS[:3], params, speculation=SHAPES[1])
    assert sum(record.stats.preemptions for record in few.records) > 0
    assert few.ids == whole.ids
    assert [r.top_logprobs for r in few.records] == [r.top_logprobs for r in whole.records]


def test_pages_without_draft_entries_are_not_shared_with_drafting_requests() -> None:
    """Answers of logit-processor steps are only in the target's caches."""
    older = {"drafted_processors": False}
    engine, cold = toy_cuda(CACHING_ALL, **older).engine, toy_cuda(**older).engine
    biased = GenerateParams(
        max_new_tokens=30, min_tokens=29, sampling=SamplingParams(presence_penalty=0.5)
    )
    for _ in range(2):
        answer = run(engine, PROMPTS[:1], biased, speculation=SHAPES[1]).ids[0]
        assert answer == decode_by_definition(PROMPTS[0], biased)
    longer = [[*PROMPTS[0], *answer, 3]]
    hit = run(engine, longer, PLAIN, speculation=SHAPES[1]).records[0]
    alone = run(cold, longer, PLAIN, speculation=SHAPES[1]).records[0]
    assert hit.output_ids == alone.output_ids
    assert hit.stats.acceptance_histogram == alone.stats.acceptance_histogram
    engine.prefixes.check_integrity()


def test_one_step_of_a_guide_is_in_flight_with_steps_of_others() -> None:
    """The cut of top-k depends on the mask, so all steps of the guide are masked and separate."""
    toy = toy_cuda()
    cut = SamplingParams(0.9, top_k=3, seed=1)
    guided = GenerateParams(max_new_tokens=12, guide=LINE.guide, sampling=cut)
    run(knowing_letters(toy.engine), PROMPTS[:2], [guided, PLAIN], speculation=None)
    steps = [name for name in toy.device.started if name.startswith("step")]
    assert any("adjusted" in name for name in steps[:4])
    assert any("adjusted" not in name for name in steps[:4])


def test_a_failed_guide_ends_its_own_output_only() -> None:
    # No token of the vocabulary is a space.
    stuck = GenerateParams(max_new_tokens=20, guide=Guide.regex("abc d"))
    engine = knowing_letters(toy_cuda().engine)
    ran = run(engine, PROMPTS[:2], [stuck, PLAIN], speculation=SHAPES[1])
    assert ran.records[0].finish_reason == "guide_failed"
    assert ran.ids[0] == run(guided_engine(), PROMPTS[:1], stuck, speculation=None).ids[0]
    assert ran.ids[1] == decode_by_definition(PROMPTS[1], PLAIN)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("min_p", GenerateParams(sampling=SamplingParams(1.0, min_p=0.1))),
        ("logit_bias", GenerateParams(sampling=SamplingParams(logit_bias={1: 2}))),
        ("top_logprobs", GenerateParams(top_logprobs=1)),
        ("min_tokens", GenerateParams(min_tokens=2)),
        ("repetition_penalty", GenerateParams(sampling=SamplingParams(repetition_penalty=2))),
    ],
)
def test_an_older_engine_names_the_field(name: str, params: GenerateParams) -> None:
    engine = toy_cuda(adjusted_steps=False).engine
    with pytest.raises(RequestError, match=f"this engine has no programs for {name}") as caught:
        engine.generate([prompt([1])], [params])
    assert caught.value.field == name
    # Without a temperature min_p cuts no token.
    greedy = GenerateParams(max_new_tokens=3, sampling=SamplingParams(min_p=0.5))
    assert run(engine, PROMPTS[:1], greedy, speculation=None).records


def test_a_number_requests_logprobs_as_true_does() -> None:
    """Callers of other libraries give a number; types of parameters are not checked."""
    started = []
    for logprobs in (True, 5, False):
        toy = toy_cuda()
        params = replace(PLAIN, logprobs=logprobs)
        run(toy.engine, PROMPTS, params, speculation=None)
        started.append(toy.device.started)
    assert started[0] == started[1] != started[2]
