"""The loop with device steps, on a GPU that runs as late as possible: tokens are exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples
from toy_device import toy_cuda
from toy_engine import prompt, run, toy_engine
from toy_model import VOCAB, choose, decode_plainly, target_logits
from toy_plan import BATCHES, SHAPES

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.device.decoder import DeviceDecoder
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError, SpecbuildError
from specbuild.runtime.measure.benchmark_batch import benchmark_batch
from specbuild.runtime.measure.graph_timing import profile_program, time_program
from specbuild.runtime.request import Event, FinishEvent, GenerateParams
from specbuild.runtime.sampling import SamplingParams


def alone(
    engine: Engine, ids: list[int], params: GenerateParams
) -> AbstractContextManager[Iterator[Event]]:
    """Return the events of one prompt without a draft."""
    return engine.session.exclusive(engine.check_prompts([prompt(ids)], params), DraftSetting(None))


tokens = st.integers(0, VOCAB - 2)
prompts = st.lists(tokens, min_size=1, max_size=30)
sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**31 - 1),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
)


@examples(40)
@given(
    st.lists(prompts, min_size=1, max_size=6),
    st.sampled_from([None, *SHAPES]),
    sampling,
    st.lists(st.integers(1, 30), min_size=6, max_size=6),
    st.booleans(),
)
def test_output_equals_plain_decoding(
    batch: list[list[int]],
    shape: DraftShape | None,
    sample: SamplingParams,
    counts: list[int],
    ignore_eos: bool,
) -> None:
    params = [
        GenerateParams(max_new_tokens=n, sampling=sample, ignore_eos=ignore_eos)
        for n in counts[: len(batch)]
    ]
    result = run(toy_cuda().engine, batch, params, speculation=shape)
    # decode_plainly stops at the end of sequence: what comes before is the same
    for ids, p, q in zip(result.ids, batch, params, strict=True):
        expected = decode_plainly(p, q.max_new_tokens, sample)
        assert ids[: len(expected)] == expected
        assert ignore_eos or ids == expected


@examples(25)
@given(
    st.lists(prompts, min_size=1, max_size=4),
    st.sampled_from([None, *SHAPES]),
    st.integers(1, 24),
    st.booleans(),
)
def test_events_and_records_equal_the_host_loop(
    batch: list[list[int]], shape: DraftShape | None, count: int, ignore_eos: bool
) -> None:
    params = GenerateParams(max_new_tokens=count, ignore_eos=ignore_eos)
    device = run(toy_cuda().engine, batch, params, speculation=shape)
    host = run(toy_engine(), batch, params, speculation=shape)
    # The host's last trees are as deep as tokens are still wanted: all their nodes may be shallow
    # ones, while the device's tree of full depth keeps other nodes. Chains are the same.
    grows = shape is not None and shape.draft_top_k > 1
    timeless = {"ttft_s": 0.0, "tpot_s": None, "output_tokens_per_s": 0.0}
    for ours, theirs in zip(device.records, host.records, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-6)
        stats = theirs.stats if grows else replace(ours.stats, **timeless)
        expected = theirs.stats if grows else replace(theirs.stats, **timeless)
        assert replace(ours, stats=stats, logprobs=None) == replace(
            theirs, stats=expected, logprobs=None
        )
        assert ours.stats.ttft_s > 0
    compared = max(count - shape.draft_depth, 0) if grows else count
    for run_events, host_events in zip(device.events, host.events, strict=True):
        drafted = [(e.token_id, e.from_draft) for e in run_events[:compared]]
        assert drafted == [(e.token_id, e.from_draft) for e in host_events[:compared]]


def test_a_draft_is_used_and_saves_steps() -> None:
    params = GenerateParams(max_new_tokens=40, ignore_eos=True)
    shape = DraftShape(3, 4, 12)
    record = run(toy_cuda().engine, [[3, 1, 4]], params, speculation=shape).records[0]
    assert sum(record.stats.acceptance_histogram[1:]) > 3
    assert record.stats.steps < 39


def test_the_next_step_is_queued_before_the_last_is_read() -> None:
    toy = toy_cuda()
    params = GenerateParams(max_new_tokens=9, ignore_eos=True)
    with alone(toy.engine, [1, 2], params) as events:
        next(events)  # the prefill's token
        next(events)  # the first step's
        assert toy.device.gpu.log.count("graph") == 1 + 2
        list(events)
    # No step is queued whose tokens are all beyond the limit.
    assert toy.device.gpu.log.count("graph") == 1 + 8


def test_programs_are_the_smallest_that_fit() -> None:
    toy = toy_cuda()
    params = [GenerateParams(max_new_tokens=n, ignore_eos=True) for n in (12, 5, 3)]
    run(toy.engine, [[1], [2], [3]], params, speculation=DraftShape(1, 1, 1))
    steps = [name.split("@")[1] for name in toy.device.started if name.startswith("step")]
    assert {name.split(".")[0] for name in steps} == {"4", "2", "1"}
    assert [n.split(".")[0] for n in steps] == sorted(
        (n.split(".")[0] for n in steps), reverse=True
    )
    assert toy.device.started[0] == "prefill@4"
    assert all(name.endswith(".0") for name in steps)


def test_full_logits_are_computed_only_if_a_request_needs_them() -> None:
    toy = toy_cuda()
    greedy = GenerateParams(max_new_tokens=12, ignore_eos=True)
    sampled = replace(
        greedy, max_new_tokens=4, sampling=SamplingParams(temperature=1.0, top_k=4, seed=3)
    )
    result = run(toy.engine, [[1, 5], [2, 7]], [greedy, sampled], speculation=DraftShape(2, 3, 6))
    assert result.ids[0] == decode_plainly([1, 5], 12, greedy.sampling)
    assert result.ids[1] == decode_plainly([2, 7], 4, sampled.sampling)
    steps = [name for name in toy.device.started if name.startswith("step")]
    assert steps[0].endswith(".1")
    assert steps[-1].endswith(".0")


def test_long_prompts_are_chunked_in_a_batch_with_short_ones() -> None:
    toy = toy_cuda()
    batch = [list(range(21)), [5], [6] * 9]
    params = GenerateParams(max_new_tokens=6)
    result = run(toy.engine, batch, params, speculation=DraftShape(2, 3, 6))
    assert result.ids == [decode_plainly(p, 6, params.sampling) for p in batch]
    prefill = [name for name in toy.device.started if name.startswith("prefill")]
    assert prefill == ["prefill@8"] * 4


def test_sequences_are_moved_when_others_end() -> None:
    batch = [[t, t + 1] for t in range(11)]
    params = [
        GenerateParams(max_new_tokens=n, sampling=SamplingParams(temperature=t, seed=n))
        for n, t in zip((2, 19, 1, 7, 30, 3, 3, 11, 1, 25, 4), [0.0, 1.0] * 6, strict=False)
    ]
    toy = toy_cuda(max_batch_size=4)
    result = run(toy.engine, batch, params, speculation=DraftShape(3, 4, 12))
    assert result.ids == [
        decode_plainly(p, q.max_new_tokens, q.sampling) for p, q in zip(batch, params, strict=True)
    ]


def test_an_unused_row_is_skipped() -> None:
    batch = [[1], [2], [3], [4]]
    params = [GenerateParams(max_new_tokens=n, ignore_eos=True) for n in (3, 20, 20, 20)]
    toy = toy_cuda(max_batch_size=4)
    run(toy.engine, batch, params, speculation=DraftShape(1, 1, 1))
    # Three sequences went on in a step of four.
    assert sum(name.startswith("step@4") for name in toy.device.started) > 5


def test_kernel_by_kernel_is_the_same() -> None:
    params = GenerateParams(max_new_tokens=10)
    toy = toy_cuda(recorded=False)
    result = run(toy.engine, [[3, 1, 4]], params, speculation=DraftShape(2, 3, 6))
    assert result.ids == [decode_plainly([3, 1, 4], 10, params.sampling)]
    assert "graph" not in toy.device.gpu.log


def test_an_engine_without_a_draft() -> None:
    toy = toy_cuda(drafted=False)
    params = GenerateParams(max_new_tokens=12)
    assert run(toy.engine, [[1, 2]], params).ids == [decode_plainly([1, 2], 12, params.sampling)]
    with pytest.raises(RequestError, match="without a draft"):
        toy.engine.generate([prompt([1])], params, speculation=DraftShape(1, 1, 1))


def test_the_default_drafts_and_learns_step_times_without_measured_costs() -> None:
    toy = toy_cuda(shapes=(*SHAPES, DraftShape(1, 2, 2)))
    params = GenerateParams(max_new_tokens=12)
    assert run(toy.engine, [[1, 2]], params).ids == [decode_plainly([1, 2], 12, params.sampling)]
    assert any(name.count("-") >= 2 for name in toy.device.started), toy.device.started
    assert "step times measured while decoding" in toy.engine.default_draft.reason


def test_a_shape_without_steps_lists_the_available_ones() -> None:
    toy = toy_cuda()
    with pytest.raises(RequestError, match=r"2x2x4 .*it has 1x1x1, 1x3x3, 2x3x6, 3x4x12"):
        toy.engine.generate([prompt([1])], GenerateParams(), speculation=DraftShape(2, 2, 4))
    with pytest.raises(RequestError, match="built for at most"):
        toy.engine.generate([prompt([1])], GenerateParams(), speculation=DraftShape(4, 4, 4))
    assert toy.device.started == []


def test_closing_a_stream_early_releases_its_pages() -> None:
    toy = toy_cuda()
    params = GenerateParams(max_new_tokens=20, ignore_eos=True)
    events = toy.engine.generate([prompt([1, 2]), prompt([7])], params, speculation=SHAPES[1])
    for _ in range(5):
        next(events)
    events.close()
    assert not toy.ledger.held


def test_measuring_rejects_concurrent_requests() -> None:
    toy = toy_cuda()
    params = GenerateParams(max_new_tokens=20, ignore_eos=True)
    with alone(toy.engine, [1, 2], params) as events:
        next(events)
        with (
            pytest.raises(RequestError, match="the engine is in use"),
            alone(toy.engine, [3], params),
        ):
            pass
        with pytest.raises(RequestError, match="the engine is serving requests"):
            next(toy.engine.decoder.score([1, 2]))
        assert toy.ledger.held
    assert not toy.ledger.held
    result = run(toy.engine, [[4, 4, 4]], params, speculation=SHAPES[2])
    assert result.ids[0][:5] == decode_plainly([4, 4, 4], 20, params.sampling)[:5]


def test_output_ends_at_max_seq_len() -> None:
    toy = toy_cuda(max_seq_len=20)
    params = GenerateParams(max_new_tokens=100, ignore_eos=True)
    for speculation in (None, *SHAPES):
        record = run(toy.engine, [list(range(13))], params, speculation=speculation).records[0]
        assert (len(record.output_ids), record.finish_reason) == (7, "length")


def test_logprobs_equal_those_of_the_target() -> None:
    sample = SamplingParams(temperature=1.0, seed=9)
    params = GenerateParams(max_new_tokens=12, sampling=sample, ignore_eos=True)
    record = run(toy_cuda().engine, [[5, 6]], params, speculation=SHAPES[2]).records[0]
    so_far = [5, 6]
    for token, logprob in zip(record.output_ids, record.logprobs or (), strict=True):
        expected, expected_logprob = choose(target_logits(so_far), sample, len(so_far) - 1)
        assert (token, logprob) == (expected, pytest.approx(expected_logprob, abs=1e-5))
        so_far.append(token)


class StopAt:
    """A text stream that stops at the n-th token."""

    def __init__(self, count: int) -> None:
        self.left, self.emitted = count, ""

    @property
    def stopped(self) -> bool:
        return self.left <= 0

    def push(self, token: int) -> str:
        self.left -= 1
        self.emitted += f"{token} "
        return f"{token} "

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize("speculation", [None, DraftShape(3, 4, 12)])
def test_a_stop_string_ends_a_sequence_on_the_device(speculation: DraftShape) -> None:
    toy = toy_cuda()
    streams = {"0": 4, "1": 90, "2": 7, "3": 90}
    toy.engine.session._text_stream = lambda request: StopAt(streams[request.id])
    batch, params = [[1], [2], [3], [9]], GenerateParams(max_new_tokens=15, ignore_eos=True)
    result = run(toy.engine, batch, params, speculation=speculation)
    for ids, p, stop in zip(result.ids, batch, (4, 15, 7, 15), strict=True):
        expected = decode_plainly(p, 15, params.sampling)
        assert len(ids) == stop
        assert ids[: len(expected)] == expected[:stop]
    reasons = [r.finish_reason for r in result.records]
    assert reasons == ["stop", "length", "stop", "length"]
    assert result.records[0].text is not None


def test_a_device_that_reports_nothing_is_noticed() -> None:
    toy = toy_cuda()
    params = GenerateParams(max_new_tokens=9, ignore_eos=True)
    with alone(toy.engine, [1, 2], params) as events:
        next(events)
        toy.device._advance = lambda *_: None
        with pytest.raises(SpecbuildError, match="ended without a result"):
            list(events)
    assert not toy.ledger.held


def test_a_device_that_ends_too_early_is_noticed() -> None:
    toy = toy_cuda()
    params = GenerateParams(max_new_tokens=9, ignore_eos=True)
    with alone(toy.engine, [1, 2], params) as events:
        # The values of the sequence's row are written before its first step.
        next(events), next(events)
        toy.device.gpu.synchronize(toy.engine.executor.runner.stream)
        toy.device.port("done").fill_(1)
        with pytest.raises(SpecbuildError, match="emitted 0 tokens for request"):
            list(events)


def test_scores_equal_the_logits_after_every_token() -> None:
    toy = toy_cuda()
    assert isinstance(toy.engine.decoder, DeviceDecoder)
    ids = [int(t) for t in "3141592653589"]
    scored = list(toy.engine.decoder.score(ids))
    assert [s.first for s in scored] == [0, 4, 8, 12]
    for s in scored:
        assert s.aux_hidden is not None
        assert len(s.logits) == len(s.aux_hidden)
        for i, logits in enumerate(s.logits):
            expected = target_logits(ids[: s.first + i + 1])
            assert logits == pytest.approx(expected, abs=1e-6)
    assert not toy.ledger.held
    with pytest.raises(RequestError, match="cannot score 65 tokens"):
        toy.engine.decoder.score([1] * 65)


def test_requests_beyond_the_free_pages_wait() -> None:
    toy = toy_cuda(max_batch_size=2, max_seq_len=32)
    batch = [[i] * 11 for i in range(7)]
    params = GenerateParams(max_new_tokens=20)
    result = run(toy.engine, batch, params, speculation=SHAPES[1])
    assert result.ids == [decode_plainly(p, 20, params.sampling) for p in batch]
    assert max(BATCHES) > 2
    assert not any(name.startswith("step@4") for name in toy.device.started)


def test_finish_events_come_last() -> None:
    events = list(
        toy_cuda().engine.generate(
            [prompt([1])], GenerateParams(max_new_tokens=3), speculation=None
        )
    )
    assert isinstance(events[-1], FinishEvent)


@pytest.mark.parametrize("shape", [None, SHAPES[1]])
def test_a_step_is_timed_from_one_state(shape: DraftShape | None) -> None:
    toy = toy_cuda()
    with benchmark_batch(toy.engine, batch=2, context=9, shape=shape) as placed:
        runner = placed.executor.runner
        entry = ProgramTable(placed.executor.plan).step(shape, batch=2, full_logits=False)
        # The fake's clock counts operations: one kernel and the mark behind it.
        assert time_program(runner, entry, 3, reset=placed.reset) == 2
        launches = profile_program(runner, entry, 3, reset=placed.reset)
        assert [launch.added_s for launch in launches] == [2]
    assert not toy.ledger.held
    lengths = {tuple(kept) for kept in toy.device.lengths[-6:]}
    assert len(lengths) == 1
    assert run(toy.engine, [[1, 2]], GenerateParams(max_new_tokens=4), speculation=None).ids == [
        decode_plainly([1, 2], 4, SamplingParams())
    ]


def test_sequences_beyond_the_largest_step_wait() -> None:
    toy = toy_cuda(max_batch_size=2 * max(BATCHES))
    batch = [[i] for i in range(max(BATCHES) + 2)]
    params = GenerateParams(max_new_tokens=5)
    found = run(toy.engine, batch, params, speculation=None).ids
    assert found == [decode_plainly(p, 5, params.sampling) for p in batch]
