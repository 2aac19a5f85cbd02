"""Many threads with one engine: each call gets its own tokens, and no failure blocks others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest
from toy_device import toy_cuda
from toy_engine import prompt, run, toy_engine
from toy_model import decode_plainly
from toy_plan import SHAPES

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import RequestError, SpecbuildError
from specbuild.runtime.request import FinishEvent, GenerateParams, TokenEvent
from specbuild.runtime.sampling import SamplingParams

ENGINES: dict[str, Callable[[], Engine]] = {
    "host": toy_engine,
    "device": lambda: toy_cuda().engine,
}
LONG = GenerateParams(max_new_tokens=40, ignore_eos=True)
pytestmark = pytest.mark.parametrize("kind", ENGINES)


def pages(engine: Engine) -> dict[str, int]:
    """Return the free pages by cache group."""
    return {name: pool.free_pages for name, pool in engine._kv.pools.items()}


def ends_of(engine: Engine, number: int) -> tuple[list[int], list[int]]:
    """Return the results of one call of many, and the expected ones."""
    sampling = SamplingParams(temperature=float(number % 2), seed=number)
    params = GenerateParams(max_new_tokens=3 + number % 17, sampling=sampling)
    ids = [number % 7, 1 + number % 5]
    shape = [None, *SHAPES][number % 3]
    given = [
        event.token_id
        for event in engine.generate([prompt(ids)], params, speculation=shape)
        if isinstance(event, TokenEvent)
    ]
    return given, decode_plainly(ids, params.max_new_tokens, sampling)


def test_several_threads_may_generate(kind: str) -> None:
    engine = ENGINES[kind]()
    free = pages(engine)
    with ThreadPoolExecutor(6) as pool:
        for given, expected in pool.map(lambda n: ends_of(engine, n), range(48)):
            assert given == expected
    assert pages(engine) == free


def test_an_exact_request_decodes_without_a_draft(kind: str) -> None:
    engine, params = ENGINES[kind](), replace(LONG, exact=True)
    for others in ([], [LONG]):
        given = [prompt([1, 2]), prompt([3])][: 1 + len(others)]
        events = list(engine.generate(given, [params, *others]))
        assert not any(event.from_draft for event in events if isinstance(event, TokenEvent))
    with pytest.raises(RequestError, match="exact decodes without a draft"):
        engine.generate([prompt([1])], params, speculation=SHAPES[0])
    with pytest.raises(RequestError, match="exact decodes without a draft"):
        engine.session.add(engine.check_prompts([prompt([1])], params), DraftSetting(SHAPES[0]))


def test_new_requests_join_the_running_loop(kind: str) -> None:
    engine, setting = ENGINES[kind](), DraftSetting(None)
    first = engine.session.add(engine.check_prompts([prompt([1, 2])], LONG), setting)
    assert isinstance(next(first), TokenEvent)
    short = GenerateParams(max_new_tokens=2, ignore_eos=True)
    added = engine.session.add(engine.check_prompts([prompt([3]), prompt([4])], short), setting)
    done = [event.request for event in added if isinstance(event, FinishEvent)]
    assert sorted(done) == [0, 1]
    assert [e.record.finish_reason for e in first if isinstance(e, FinishEvent)] == ["length"]


def test_closing_a_stream_returns_the_tokens_so_far(kind: str) -> None:
    engine, setting = ENGINES[kind](), DraftSetting(SHAPES[0])
    free = pages(engine)
    prompts = [prompt([1, 2]), prompt([5]), *(prompt([i]) for i in range(12))]
    stream = engine.session.add(engine.check_prompts(prompts, LONG), setting)
    seen = [next(stream) for _ in range(4)]
    stream.close()
    assert pages(engine) == free
    seen += list(stream)
    ends = {event.request: event.record for event in seen if isinstance(event, FinishEvent)}
    assert sorted(ends) == list(range(len(prompts)))
    for number, record in ends.items():
        mine = [e.token_id for e in seen if isinstance(e, TokenEvent) and e.request == number]
        assert list(record.output_ids) == mine
        assert record.finish_reason in ("abort", "length")
    assert "abort" in {record.finish_reason for record in ends.values()}


def test_all_that_run_or_wait_are_aborted_at_once(kind: str) -> None:
    engine = ENGINES[kind]()
    free = pages(engine)
    requests = engine.check_prompts([prompt([1, 2])], LONG)
    streams = [engine.session.add(requests, DraftSetting(shape)) for shape in (None, SHAPES[-1])]
    next(streams[0])
    assert engine.session.abort().wait(300)
    assert pages(engine) == free
    for stream in streams:
        ends = [e.record.finish_reason for e in stream if isinstance(e, FinishEvent)]
        assert ends in (["abort"], ["length"])
    short = GenerateParams(max_new_tokens=9)
    again = run(engine, [[1, 2]], short, speculation=None)
    assert again.ids == [decode_plainly([1, 2], 9, short.sampling)]


def test_events_can_be_delivered_instead_of_read(kind: str) -> None:
    engine, setting = ENGINES[kind](), DraftSetting(SHAPES[0])
    free, batches = pages(engine), SimpleQueue[object]()
    requests = engine.check_prompts([prompt([1, 2]), prompt([5])], LONG)
    stream = engine.session.add(requests, setting, batches.put)
    seen = [batches.get()]
    assert stream.abort().wait(300)
    assert pages(engine) == free
    while not batches.empty():
        seen.append(batches.get())
    events = [event for batch in seen for event in batch]  # type: ignore[attr-defined]
    ends = [event.request for event in events if isinstance(event, FinishEvent)]
    assert sorted(ends) == [0, 1]


def test_a_failing_consumer_stops_its_own_requests_only(kind: str) -> None:
    engine, setting = ENGINES[kind](), DraftSetting(SHAPES[0])
    free, received = pages(engine), SimpleQueue[object]()

    def fail(batch: object) -> None:
        received.put(batch)
        raise RuntimeError("Event loop is closed")

    (request,) = engine.check_prompts([prompt([1, 2])], LONG)
    stream = engine.session.add([request], setting)
    engine.session.add(engine.check_prompts([prompt([5])], LONG), setting, fail)
    tokens = [event.token_id for event in stream if isinstance(event, TokenEvent)]
    assert len(tokens) == LONG.max_new_tokens
    plain = decode_plainly([1, 2], LONG.max_new_tokens, SamplingParams())  # up to its EOS
    assert tokens[: len(plain)] == plain
    assert engine.session.join(60)
    assert received.qsize() == 1 and pages(engine) == free
    assert ends_of(engine, 4)[0] == ends_of(engine, 4)[1]


def test_a_stop_token_ends_an_output_and_is_its_last(kind: str) -> None:
    engine = ENGINES[kind]()
    sampling = SamplingParams(temperature=1.0, seed=4)
    plain = decode_plainly([1, 2], 40, sampling)
    stop = plain[9]
    params = GenerateParams(40, sampling, stop_token_ids=(stop, 250))
    for shape in (None, *SHAPES):
        run_ = run(engine, [[1, 2]], params, speculation=shape)
        assert run_.ids == [plain[: plain.index(stop) + 1]]
        assert run_.records[0].finish_reason == "stop"


def test_a_call_that_is_never_read_runs_nothing(kind: str) -> None:
    engine = ENGINES[kind]()
    events = engine.generate([prompt([1])], LONG, speculation=None)
    events.close()  # type: ignore[attr-defined]
    assert engine.session._thread is None


def test_a_request_with_another_draft_waits_and_can_be_aborted(kind: str) -> None:
    engine = ENGINES[kind]()
    first = engine.session.add(engine.check_prompts([prompt([1])], LONG), DraftSetting(None))
    next(first)
    waiting = engine.session.add(engine.check_prompts([prompt([2])], LONG), DraftSetting(SHAPES[0]))
    other = engine.session.add(engine.check_prompts([prompt([3])], LONG), DraftSetting(SHAPES[1]))
    waiting.close()
    assert len([e for e in other if isinstance(e, TokenEvent)]) == LONG.max_new_tokens
    last = list(waiting)[-1]
    assert isinstance(last, FinishEvent) and last.record.finish_reason in ("abort", "length")
    list(first)


def test_an_error_ends_running_requests_only(kind: str) -> None:
    engine = ENGINES[kind]()
    free = pages(engine)
    loop_of = engine.decoder.loop

    def failing(setting: DraftSetting, **options: object) -> object:
        loop = loop_of(setting, **options)  # type: ignore[arg-type]
        turn = loop.turn

        def fails() -> object:
            if loop._scheduler.sequences and loop._scheduler.sequences[0].num_output_tokens > 3:
                raise SpecbuildError("the machine broke")
            return turn()

        loop.turn = fails  # type: ignore[method-assign,assignment]
        return loop

    engine.decoder.loop = failing  # type: ignore[method-assign,assignment]
    with pytest.raises(SpecbuildError, match="the machine broke"):
        list(engine.generate([prompt([1]), prompt([2])], LONG, speculation=None))
    assert pages(engine) == free
    engine.decoder.loop = loop_of  # type: ignore[method-assign]
    ids = [
        e.token_id
        for e in engine.generate([prompt([1])], LONG, speculation=None)
        if isinstance(e, TokenEvent)
    ]
    plain = decode_plainly([1], LONG.max_new_tokens, LONG.sampling)
    assert ids[: len(plain)] == plain


def test_a_failing_abort_does_not_hang_other_threads(kind: str) -> None:
    """Neither the aborting thread, nor requests that join in the same pause between two turns."""
    engine, setting = ENGINES[kind](), DraftSetting(None)
    loop_of, held, go = engine.decoder.loop, threading.Event(), threading.Event()

    def failing(setting: DraftSetting, **options: object) -> object:
        loop = loop_of(setting, **options)  # type: ignore[arg-type]
        turn = loop.turn

        def paused() -> object:
            held.set()
            assert go.wait(120)
            return turn()

        def fails(_index: int) -> None:
            raise SpecbuildError("the machine broke")

        loop.turn, loop.abort = paused, fails  # type: ignore[method-assign,assignment]
        return loop

    engine.decoder.loop = failing  # type: ignore[method-assign,assignment]
    broken = engine.session.add(engine.check_prompts([prompt([1])], LONG), setting)
    assert held.wait(120)
    engine.decoder.loop = loop_of  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(broken.close)
        while not engine.session._inbox:
            time.sleep(0.001)
        joined = engine.session.add(engine.check_prompts([prompt([2])], LONG), setting)
        go.set()
        closing.result(timeout=120)
    with pytest.raises(SpecbuildError, match="the machine broke"):
        list(broken)
    assert len([e for e in joined if isinstance(e, TokenEvent)]) == LONG.max_new_tokens


def test_the_thread_ends_with_the_work(kind: str) -> None:
    engine = ENGINES[kind]()
    list(engine.generate([prompt([1])], LONG, speculation=None))
    deadline_s = time.monotonic() + 120
    while engine.session._thread is not None and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert engine.session._thread is None


def test_invalid_requests_are_rejected_in_the_calling_thread(kind: str) -> None:
    engine = ENGINES[kind]()
    before = threading.active_count()
    requests = engine.check_prompts([prompt([1])], LONG)
    with pytest.raises(RequestError, match=r"built for at most|it has"):
        engine.session.add(requests, DraftSetting(type(SHAPES[0])(99, 2, 2)))
    assert threading.active_count() == before


def test_a_request_with_full_logits_shares_steps_with_others(kind: str) -> None:
    """A request with top-k shares steps with others, and changes none of their tokens."""
    engine = ENGINES[kind]()
    picky = SamplingParams(temperature=1.0, top_k=4, seed=3)
    params = [
        GenerateParams(max_new_tokens=12, sampling=picky if i == 2 else SamplingParams())
        for i in range(5)
    ]
    given: dict[int, list[int]] = {i: [] for i in range(5)}
    for event in engine.generate([prompt([i, 3]) for i in range(5)], params, speculation=None):
        if isinstance(event, TokenEvent):
            given[event.request].append(event.token_id)
    for i, each in enumerate(params):
        assert given[i] == decode_plainly([i, 3], 12, each.sampling)
    assert np.all([len(ids) > 0 for ids in given.values()])
