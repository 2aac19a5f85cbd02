"""The decoding loop with the toy model: any draft gives the tokens of no draft."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples
from toy_engine import TreeOfTokens, prompt, repeating, right, run, toy_engine, wrong
from toy_model import EOS, VOCAB, choose, decode_plainly, target_logits

from specbuild.runtime.cache.row_placement import SlotCounter
from specbuild.runtime.draft.drafter import DrafterParts
from specbuild.runtime.draft.eagle3 import Eagle3Drafter
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError, SpecbuildError
from specbuild.runtime.request import GenerateParams, TokenEvent
from specbuild.runtime.sampling import SamplingParams

tokens = st.integers(0, VOCAB - 2)
prompts = st.lists(tokens, min_size=1, max_size=30)
sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**31 - 1),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
)
shapes = st.builds(DraftShape, st.just(1), st.integers(1, 4), st.integers(1, 1)).map(
    lambda s: DraftShape(1, s.draft_depth, s.draft_depth)
) | st.tuples(st.integers(2, 3), st.integers(1, 4), st.integers(1, 12)).map(
    lambda s: DraftShape(s[0], s[1], min(s[2], s[0] + (s[1] - 1) * s[0] ** 2))
)


def parents_of(depth_limit: int) -> st.SearchStrategy[list[int]]:
    """Return random trees in order of depth, with at most 12 nodes."""

    def in_order(draws: list[int]) -> list[int]:
        depths, parents = [0], []
        for draw in draws:
            allowed = [i for i, d in enumerate(depths) if d < depth_limit and d + 1 >= depths[-1]]
            if not allowed:
                break
            parent = allowed[draw % len(allowed)]
            parents.append(parent - 1)
            depths.append(depths[parent] + 1)
        return parents

    return st.lists(st.integers(0, 1000), min_size=1, max_size=12).map(in_order)


@examples(60)
@given(st.lists(prompts, min_size=1, max_size=4), shapes, sampling, st.integers(1, 30))
def test_eagle3_output_equals_plain_decoding(
    batch: list[list[int]], shape: DraftShape, sample: SamplingParams, count: int
) -> None:
    params = GenerateParams(max_new_tokens=count, sampling=sample)
    engine = toy_engine()
    expected = [decode_plainly(p, count, sample) for p in batch]
    assert run(engine, batch, params, speculation=None).ids == expected
    assert run(engine, batch, params, speculation=shape).ids == expected


@examples(60)
@given(
    st.lists(prompts, min_size=1, max_size=3),
    st.sampled_from([right, wrong, repeating]),
    parents_of(4),
    sampling,
    st.integers(1, 24),
)
def test_adversarial_trees_change_nothing(
    batch: list[list[int]], rule: object, parents: list[int], sample: SamplingParams, count: int
) -> None:
    params = GenerateParams(max_new_tokens=count, sampling=sample)
    drafter = TreeOfTokens(rule, parents, reads_aux_hidden=True)
    result = run(toy_engine(), batch, params, drafter=drafter, speculation=DraftShape(3, 4, 12))
    assert result.ids == [decode_plainly(p, count, sample) for p in batch]
    assert sorted(drafter.released) == list(range(len(batch)))
    accepted = [r.stats.acceptance_histogram for r in result.records]
    if rule is wrong:
        assert all(sum(h[1:]) == 0 for h in accepted)


def test_a_correct_chain_is_accepted_completely() -> None:
    params = GenerateParams(max_new_tokens=21, ignore_eos=True)
    drafter = TreeOfTokens(right, [-1, 0, 1, 2])
    result = run(
        toy_engine(), [[3, 1, 4]], params, drafter=drafter, speculation=DraftShape(3, 4, 12)
    )
    stats = result.records[0].stats
    assert stats.acceptance_histogram == (0, 0, 0, 0, 4)
    assert (stats.steps, stats.output_tokens) == (4, 21)
    assert stats.mean_acceptance_length == 5.0
    assert [e.from_draft for e in result.events[0]] == [False] + 4 * ([True] * 4 + [False])


@examples(40)
@given(st.lists(prompts, min_size=1, max_size=3), shapes, st.integers(1, 30), st.booleans())
def test_statistics_add_up(
    batch: list[list[int]], shape: DraftShape, count: int, ignore_eos: bool
) -> None:
    params = GenerateParams(max_new_tokens=count, ignore_eos=ignore_eos)
    result = run(toy_engine(), batch, params, speculation=shape)
    for record, events in zip(result.records, result.events, strict=True):
        stats, histogram = record.stats, record.stats.acceptance_histogram
        assert sum(histogram) == stats.steps
        assert len(histogram) == shape.draft_depth + 1
        drafts = sum(a * n for a, n in enumerate(histogram))
        assert drafts == sum(e.from_draft for e in events)
        emitted = stats.output_tokens - 1
        ended_on_draft = events[-1].from_draft
        assert emitted == drafts + stats.steps - ended_on_draft
        assert ended_on_draft <= (record.finish_reason == "eos")
        if stats.steps:
            assert stats.mean_acceptance_length == pytest.approx(emitted / stats.steps)
        for i, share in enumerate(stats.acceptance_per_position):
            assert share * stats.steps == pytest.approx(sum(histogram[i + 1 :]))
        assert stats.output_tokens == len(record.output_ids) <= count
        assert stats.ttft_s > 0


def test_logprobs_equal_those_of_the_target() -> None:
    sample = SamplingParams(temperature=1.0, seed=9)
    params = GenerateParams(max_new_tokens=12, sampling=sample, ignore_eos=True)
    record = run(toy_engine(), [[5, 6]], params, speculation=DraftShape(2, 3, 6)).records[0]
    so_far = [5, 6]
    for token, logprob in zip(record.output_ids, record.logprobs or (), strict=True):
        expected, expected_logprob = choose(target_logits(so_far), sample, len(so_far) - 1)
        assert (token, logprob) == (expected, pytest.approx(expected_logprob, abs=1e-5))
        so_far.append(token)


def test_output_ends_at_max_seq_len() -> None:
    engine = toy_engine(max_seq_len=20)
    params = GenerateParams(max_new_tokens=100, ignore_eos=True)
    for speculation in (None, DraftShape(1, 4, 4), DraftShape(3, 4, 12)):
        record = run(engine, [list(range(13))], params, speculation=speculation).records[0]
        assert (len(record.output_ids), record.finish_reason) == (7, "length")


def test_eos_inside_an_accepted_path_ends_there() -> None:
    sample = SamplingParams(temperature=1.0, seed=0)
    found = 0
    for seed in range(60):
        sample = SamplingParams(temperature=1.0, seed=seed)
        expected = decode_plainly([2, 7], 40, sample)
        if expected[-1] != EOS:
            continue
        drafter = TreeOfTokens(right, [-1, 0, 1, 2])
        params = GenerateParams(max_new_tokens=40, sampling=sample)
        result = run(
            toy_engine(), [[2, 7]], params, drafter=drafter, speculation=DraftShape(3, 4, 12)
        )
        assert result.ids == [expected]
        assert result.records[0].finish_reason == "eos"
        found += result.events[0][-1].from_draft
    assert found > 0


def test_requests_may_have_different_parameters() -> None:
    params = [
        GenerateParams(max_new_tokens=n, sampling=SamplingParams(temperature=t, seed=s))
        for n, t, s in ((5, 0.0, 0), (17, 1.0, 3), (9, 1.0, 4), (1, 0.0, 0), (12, 0.7, 5))
    ]
    batch = [[1], [2, 3, 4], list(range(25)), [9, 9], [4] * 11]
    result = run(toy_engine(max_batch_size=2), batch, params, speculation=DraftShape(2, 3, 8))
    expected = [
        decode_plainly(p, q.max_new_tokens, q.sampling) for p, q in zip(batch, params, strict=True)
    ]
    assert result.ids == expected


def test_prefill_packs_chunks_of_several_sequences() -> None:
    engine = toy_engine(max_rows=8)
    run(engine, [[1] * 5, [2] * 12], GenerateParams(max_new_tokens=1), speculation=None)
    prefill = [rows for role, rows in engine.executor.launches if role == "target"]
    assert prefill == [8, 8, 1]


def test_closing_early_releases_the_pages() -> None:
    engine = toy_engine()
    free = [pool.free_pages for pool in engine._kv.pools.values()]
    events = engine.generate([prompt([1, 2])], GenerateParams(), speculation=DraftShape(1, 2, 2))
    next(events)
    events.close()
    assert [pool.free_pages for pool in engine._kv.pools.values()] == free


def test_a_second_call_waits_for_pages() -> None:
    engine = toy_engine(max_batch_size=1, max_seq_len=20)
    params = GenerateParams(max_new_tokens=18)
    first = engine.generate([prompt([1, 2])], params, speculation=None)
    begun = next(first)
    beside = engine.generate([prompt([5])], params, speculation=None)
    second = [event.token_id for event in beside if isinstance(event, TokenEvent)]
    assert second == decode_plainly([5], 18, params.sampling)
    rest = [event.token_id for event in first if isinstance(event, TokenEvent)]
    assert [begun.token_id, *rest] == decode_plainly([1, 2], 18, params.sampling)


def test_without_a_draft_no_draft_graph_runs() -> None:
    engine = toy_engine()
    run(engine, [[1, 2, 3]], GenerateParams(max_new_tokens=9), speculation=None)
    assert {role for role, _ in engine.executor.launches} == {"target", "choose"}


def test_default_speculation_measures_and_decodes_the_same() -> None:
    engine = toy_engine(max_seq_len=256, max_rows=32)
    params = GenerateParams(max_new_tokens=60, ignore_eos=True)
    plain = run(engine, [[1, 2, 3]], params, speculation=None)
    assert run(engine, [[1, 2, 3]], params).ids == plain.ids
    assert "tokens/s" in engine.default_draft.reason


@pytest.mark.parametrize("max_seq_len", range(2, 20))
def test_short_limits_leave_room_for_the_default_draft(max_seq_len: int) -> None:
    engine = toy_engine(max_seq_len=max_seq_len, max_rows=32)
    params = GenerateParams(max_new_tokens=max_seq_len, ignore_eos=True)
    plain = run(engine, [[1]], params, speculation=None)
    assert run(engine, [[1]], params).ids == plain.ids
    reason = engine.default_draft.reason
    assert ("tokens/s" if max_seq_len >= 9 else "is too short") in reason


@pytest.mark.parametrize("read", [1, 2, 4])
def test_a_drafter_forgets_the_sequences_of_a_generation_that_was_closed(read: int) -> None:
    engine, shape = toy_engine(), DraftShape(1, 2, 2)
    params = GenerateParams(max_new_tokens=40, ignore_eos=True)

    def drafter() -> Eagle3Drafter:
        return Eagle3Drafter(
            DrafterParts(
                engine.executor, engine.manifest, SlotCounter(500), engine.manifest.drafters[0]
            )
        )

    wanted = run(engine, [[7, 8]], params, speculation=shape, drafter=drafter())
    used = drafter()
    closed = engine.generate([prompt([1, 2, 3, 4])], params, speculation=shape, drafter=used)
    for _ in range(read):
        next(closed)
    closed.close()
    again = run(engine, [[7, 8]], params, speculation=shape, drafter=used)
    assert again.ids == wanted.ids
    histograms = [r.records[0].stats.acceptance_histogram for r in (again, wanted)]
    assert histograms[0] == histograms[1]


def test_logits_that_are_no_numbers_are_an_error() -> None:
    engine = toy_engine()
    run_role, calls = engine.executor.run, []

    def harmed(role: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = run_role(role, feeds)
        if role == "choose":
            calls.append(role)
            if len(calls) == 3:
                outputs["logprob"][:] = np.nan
        return outputs

    engine.executor.run = harmed  # type: ignore[method-assign]
    free = [pool.free_pages for pool in engine._kv.pools.values()]
    params = GenerateParams(max_new_tokens=9, ignore_eos=True)
    events = engine.generate([prompt([1, 2], "ill")], params, speculation=None)
    with pytest.raises(SpecbuildError, match="'ill': the target's logits of output token 3 are"):
        list(events)
    assert [pool.free_pages for pool in engine._kv.pools.values()] == free


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((), "is empty"),
        ((1, 99), "99 is outside the vocabulary"),
        ((-1,), "-1 is outside"),
        ((1,) * 64, "64 tokens"),
        ((1, 2.5), "a token id is 2.5, must be a whole number"),
        ((1, "3"), "a token id is '3', must be a whole number"),
    ],
)
def test_the_error_names_an_invalid_prompt(ids: tuple[int, ...], message: str) -> None:
    engine = toy_engine()
    with pytest.raises(RequestError, match=message) as caught:
        engine.generate([prompt([1]), prompt(ids, "bad one")], GenerateParams())
    assert "'bad one'" in str(caught.value)
    assert engine.executor.launches == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5, must be a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, must be 1 or above"),
        ({"stop": "ab"}, "stop is the string 'ab', must be a tuple"),
        ({"stop": ("a", "")}, "a stop string is empty"),
    ],
)
def test_the_error_names_invalid_parameters(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        GenerateParams(**values)


@pytest.mark.parametrize(("name", "above"), [("top_k", 2**31), ("seed", 2**64)])
def test_sampling_accepts_integers(name: str, above: int) -> None:
    assert getattr(SamplingParams(**{name: np.int64(3)}), name) == 3
    with pytest.raises(RequestError, match=f"{name} is 1.5, must be a whole number"):
        SamplingParams(**{name: 1.5})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=f"{name} is {above}, must "):
        SamplingParams(**{name: above})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shape",
    [
        DraftShape(4, 4, 4),
        DraftShape(3, 5, 4),
        DraftShape(3, 4, 13),
        DraftShape(1, 2, 3),
        DraftShape(0, 1, 1),
    ],
)
def test_rejects_a_shape_beyond_the_limits(shape: DraftShape) -> None:
    with pytest.raises(RequestError, match="draft_"):
        toy_engine().generate([prompt([1])], GenerateParams(), speculation=shape)
