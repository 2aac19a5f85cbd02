"""Requests that join and leave a running loop: each gets what it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_device import toy_cuda
from toy_engine import prompt, toy_engine
from toy_model import VOCAB, decode_plainly
from toy_plan import SHAPES

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import Event, FinishEvent, GenerateParams, TokenEvent
from specbuild.runtime.sampling import SamplingParams

ENGINES: dict[str, Callable[[], Engine]] = {
    "host": toy_engine,
    "device": lambda: toy_cuda().engine,
}
prompts = st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=30)


@dataclass(frozen=True)
class Visit:
    """A request that comes at a turn, and may be aborted at a later one."""

    ids: list[int]
    tokens: int
    turn: int
    leaves: int | None
    sampling: SamplingParams


visits = st.builds(
    Visit,
    ids=prompts,
    tokens=st.integers(1, 25),
    turn=st.integers(0, 12),
    leaves=st.one_of(st.none(), st.integers(0, 16)),
    sampling=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 2**31 - 1),
    ),
)


def pages_of(engine: Engine) -> dict[str, int]:
    """Free pages by cache group."""
    return {name: pool.free_pages for name, pool in engine._kv.pools.items()}


def serve(
    engine: Engine, visitors: list[Visit], shape: DraftShape | None
) -> tuple[dict[int, list[int]], dict[int, FinishEvent]]:
    """Token ids and ends of all visitors; holds after each turn that no page is lost."""
    free = pages_of(engine)
    loop = engine.decoder.loop(DraftSetting(shape), text_stream=engine._text_stream)
    numbers: dict[int, int] = {}
    tokens: dict[int, list[int]] = {i: [] for i in range(len(visitors))}
    ends: dict[int, FinishEvent] = {}

    def take(events: list[Event]) -> None:
        for event in events:
            visitor = numbers[event.request]
            assert visitor not in ends, "an event behind the end"
            if isinstance(event, FinishEvent):
                ends[visitor] = event
            else:
                assert isinstance(event, TokenEvent)
                tokens[visitor].append(event.token_id)

    loop.open()
    turn = 0
    while turn <= 16 or not loop.idle:
        for i, visitor in enumerate(visitors):
            if visitor.turn == turn:
                params = GenerateParams(max_new_tokens=visitor.tokens, sampling=visitor.sampling)
                (request,) = engine.check_prompts([prompt(visitor.ids, str(i))], params)
                numbers[loop.add(request)] = i
            elif visitor.leaves == turn and i in numbers.values():
                number = next(n for n, v in numbers.items() if v == i)
                ended = loop.abort(number)
                assert (ended is None) == (i in ends)
                take([ended] if ended is not None else [])
        if not loop.idle:
            take(loop.turn())
        held = {name: 0 for name in free}
        for sequence in loop._scheduler.sequences:
            for name, pages in sequence.pages.items():
                held[name] += len({*pages.table.tolist()} - {0})
        assert {n: pages_of(engine)[n] + held[n] for n in free} == free
        turn += 1
    loop.close()
    assert pages_of(engine) == free
    return tokens, ends


@pytest.mark.parametrize("kind", ENGINES)
@settings(max_examples=40, deadline=None)
@given(st.lists(visits, min_size=1, max_size=7), st.sampled_from([None, *SHAPES]))
def test_each_gets_what_it_gets_alone(
    kind: str, visitors: list[Visit], shape: DraftShape | None
) -> None:
    tokens, ends = serve(ENGINES[kind](), visitors, shape)
    assert set(ends) == set(range(len(visitors)))
    for i, visitor in enumerate(visitors):
        alone = decode_plainly(visitor.ids, visitor.tokens, visitor.sampling)
        record = ends[i].record
        assert list(record.output_ids) == tokens[i]
        if record.finish_reason == "abort":
            assert tokens[i] == alone[: len(tokens[i])] and len(tokens[i]) < visitor.tokens
        else:
            assert tokens[i] == alone


@pytest.mark.parametrize("kind", ENGINES)
def test_a_request_that_waits_is_aborted_without_having_run(kind: str) -> None:
    engine = ENGINES[kind]()
    most = engine.manifest.limits.max_batch_size
    loop = engine.decoder.loop(DraftSetting(None), text_stream=engine._text_stream)
    params = GenerateParams(max_new_tokens=8, ignore_eos=True)
    requests = engine.check_prompts([prompt([1, 2], str(i)) for i in range(most + 1)], params)
    numbers = [loop.add(request) for request in requests]
    loop.open()
    loop.turn()
    ended = loop.abort(numbers[-1])
    assert ended is not None and ended.record.finish_reason == "abort"
    assert ended.record.output_ids == () and ended.record.stats.output_tokens == 0
    assert loop.abort(numbers[-1]) is None
    finished: list[int] = []
    while not loop.idle:
        finished += [e.request for e in loop.turn() if isinstance(e, FinishEvent)]
    loop.close()
    assert sorted(finished) == numbers[:-1]


@pytest.mark.parametrize("kind", ENGINES)
def test_a_long_request_does_not_keep_others_waiting(kind: str) -> None:
    """Three short requests come while one runs: they are read and finished beside it."""
    long = Visit([1, 2, 3], 25, 0, None, SamplingParams())
    short = [Visit([4, i], 2, 3, None, SamplingParams()) for i in range(3)]
    engine = ENGINES[kind]()
    order: list[int] = []
    loop = engine.decoder.loop(DraftSetting(None), text_stream=engine._text_stream)
    loop.open()
    for turn in range(100):
        for visitor in [v for v in (long, *short) if v.turn == turn]:
            params = GenerateParams(max_new_tokens=visitor.tokens, ignore_eos=True)
            loop.add(engine.check_prompts([prompt(visitor.ids)], params)[0])
        if not loop.idle:
            order += [e.request for e in loop.turn() if isinstance(e, FinishEvent)]
    loop.close()
    assert sorted(order[:3]) == [1, 2, 3] and order[3] == 0
