"""Requests that join and leave a running loop: each gets the output that it gets alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples
from toy_device import toy_cuda
from toy_engine import prompt, toy_engine
from toy_model import VOCAB, decode_plainly
from toy_plan import SHAPES

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.loop import Loop
from specbuild.runtime.decode.scheduler import Chunk
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import (
    Event,
    FinishEvent,
    GenerateParams,
    SequenceState,
    TokenEvent,
)
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import PrefillSchedule

ENGINES: dict[str, Callable[[], Engine]] = {
    "host": toy_engine,
    "device": lambda: toy_cuda().engine,
}
prompts = st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=30)


@dataclass(frozen=True)
class Visit:
    """A request that arrives at a turn, and may be aborted at a later one."""

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
    """Return the free pages by cache group."""
    return {name: pool.free_pages for name, pool in engine._kv.pools.items()}


def watch_turns(loop: Loop, prefill: PrefillSchedule) -> None:
    """Check at each launch that prompts and steps alternate, and that no prompt waits long."""
    stepper, scheduler = loop._stepper, loop._scheduler
    start_prompts, start, admitted = stepper.start_prompts, stepper.start, loop._admit
    patience: dict[int, int] = {}
    since_prompts, since_step = 0, 0

    def admit(*of_request: Any) -> SequenceState:
        sequence = admitted(*of_request)
        patience[sequence.index] = 1 + len(scheduler._prompts)
        return sequence

    def prompts_start(chunks: Sequence[Chunk]) -> None:
        nonlocal since_prompts, since_step
        assert sum(chunk.count for chunk in chunks) <= (prefill.max_rows or 99)
        decoding = [
            s
            for s in scheduler.decodable
            if s.num_output_tokens and s.tokens_left > s.steps_in_flight
        ]
        assert since_prompts >= prefill.steps_between or not decoding
        since_prompts, since_step = 0, since_step + 1
        for index in patience:
            patience[index] -= 1
        for chunk in chunks:
            patience[chunk.sequence.index] = len(scheduler._prompts)
        waiting = {sequence.index for sequence in scheduler._prompts}
        assert all(patience[index] > 0 for index in waiting)
        start_prompts(chunks)

    def step_starts(sequences: Sequence[SequenceState], *rest: Any) -> None:
        nonlocal since_prompts, since_step
        since_prompts, since_step = since_prompts + 1, 0
        assert since_prompts <= prefill.steps_between or not scheduler._prompts
        assert all(s.num_output_tokens for s in sequences)
        start(sequences, *rest)

    loop._admit = admit  # type: ignore[method-assign]
    stepper.start_prompts, stepper.start = prompts_start, step_starts  # type: ignore[method-assign]


def serve(
    engine: Engine, visitors: list[Visit], shape: DraftShape | None, prefill: PrefillSchedule
) -> tuple[dict[int, list[int]], dict[int, FinishEvent]]:
    """Return token ids and ends of all requests; check after each turn that no page is lost."""
    free = pages_of(engine)
    loop = engine.decoder.loop(
        DraftSetting(shape), text_stream=engine._text_stream, prefill=prefill
    )
    watch_turns(loop, prefill)
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
        held: dict[str, list[int]] = {name: [] for name in free}
        for sequence in loop._scheduler.sequences:
            for name, pages in sequence.pages.items():
                held[name] += {*pages.table.tolist()} - {0}
        assert {n: pages_of(engine)[n] + len({*held[n]}) for n in free} == free
        assert engine.prefixes or all(len(p) == len({*p}) for p in held.values())
        turn += 1
    loop.close()
    assert pages_of(engine) == free
    return tokens, ends


@pytest.mark.parametrize("kind", ENGINES)
@examples(20)
@given(
    st.lists(visits, min_size=1, max_size=7),
    st.sampled_from([None, *SHAPES]),
    st.builds(PrefillSchedule, st.sampled_from([None, 1, 3, 5]), st.integers(0, 3)),
)
def test_requests_in_a_batch_have_the_tokens_that_they_have_alone(
    kind: str, visitors: list[Visit], shape: DraftShape | None, prefill: PrefillSchedule
) -> None:
    tokens, ends = serve(ENGINES[kind](), visitors, shape, prefill)
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
def test_a_waiting_request_can_be_aborted(kind: str) -> None:
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
def test_a_long_request_does_not_delay_others(kind: str) -> None:
    """Three short requests arrive while one runs, and finish before it."""
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


@pytest.mark.parametrize("kind", ENGINES)
def test_a_short_prompt_is_processed_with_a_long_one(kind: str) -> None:
    engine = ENGINES[kind]()
    prefill = PrefillSchedule(max_rows=4)
    loop = engine.decoder.loop(DraftSetting(None), text_stream=engine._text_stream, prefill=prefill)
    params = GenerateParams(max_new_tokens=3, ignore_eos=True)
    for ids in ([1] * 40, [2] * 2, [3] * 2):
        loop.add(engine.check_prompts([prompt(ids)], params)[0])
    ends = [event.request for event in loop.run() if isinstance(event, FinishEvent)]
    assert ends == [1, 2, 0]


def started_beside(loop: Loop) -> list[tuple[int, list[int]]]:
    """Return for each launch of prompts the launches in flight at its start, and its sequences."""
    found: list[tuple[int, list[int]]] = []
    start = loop._stepper.start_prompts

    def kept(chunks: Sequence[Chunk]) -> None:
        found.append((loop._stepper.in_flight, [chunk.sequence.index for chunk in chunks]))
        start(chunks)

    loop._stepper.start_prompts = kept  # type: ignore[method-assign]
    return found


def test_new_requests_start_before_the_device_is_idle() -> None:
    toy = toy_cuda()
    engine, params = toy.engine, GenerateParams(max_new_tokens=20, ignore_eos=True)
    first, second = engine.check_prompts([prompt([1, 2]), prompt([3, 4])], params)
    loop = engine.decoder.loop(DraftSetting(None), text_stream=engine._text_stream)
    launches = started_beside(loop)
    loop.add(first)
    loop.open()
    for _ in range(4):
        loop.turn()
    loop.add(second)
    stream = engine.executor.runner.stream
    waiting: list[int] = []
    for _ in range(4):
        loop.turn()
        waiting.append(len(stream.waiting))
    assert launches == [(0, [0]), (1, [1])]
    assert min(waiting) > 0, "the device ran out of work"
    loop.close()


@pytest.mark.parametrize("shape", [None, SHAPES[2]])
def test_a_row_is_reused_after_an_abort_during_its_prompt(
    shape: DraftShape | None,
) -> None:
    toy = toy_cuda(max_batch_size=4)
    engine, params = toy.engine, GenerateParams(max_new_tokens=12, ignore_eos=True)
    loop = engine.decoder.loop(DraftSetting(shape), text_stream=engine._text_stream)
    requests = engine.check_prompts([prompt([i, 7]) for i in range(4)], params)
    for request in requests[:2]:
        loop.add(request)
    loop.open()
    tokens: dict[int, list[int]] = {i: [] for i in range(4)}
    for turn in range(60):
        if turn == 4:
            loop.add(requests[2])
            loop.add(requests[3])
        if turn == 5:
            # The prompts of 2 and 3 are in flight: 3 moves to the row of 2, or of 0.
            assert (
                len(loop._scheduler.decodable) == 4
                and not loop._scheduler.running_sequence(3).num_output_tokens
            )  # type: ignore[union-attr]
            assert loop.abort(2) is not None and loop.abort(0) is not None
        for event in [] if loop.idle else loop.turn():
            if isinstance(event, TokenEvent):
                tokens[event.request].append(event.token_id)
    loop.close()
    assert loop.idle and not toy.ledger.held and not tokens[2]
    for i in (1, 3):
        plain = decode_plainly([i, 7], 12, params.sampling)
        assert tokens[i][: len(plain)] == plain and len(tokens[i]) == 12


def test_rejects_prefill_rows_of_0() -> None:
    with pytest.raises(RequestError, match="prefill_rows_per_turn is 0, must be 1 or above"):
        PrefillSchedule(max_rows=0)


def test_a_shape_chosen_ahead_is_used_only_in_a_step_like_that_one() -> None:
    """A refusal by a guide in the meantime makes the step write logits, or leaves a row out."""
    ahead = StepContext(3, 9, 0)
    policy = SimpleNamespace(shape=lambda context: DraftShape(1, 1 + context.full_logits, 1))
    stepper = SimpleNamespace(step_context=lambda _: ahead, prepare_step=lambda *_: None)
    scheduler = SimpleNamespace(draftable=[SimpleNamespace(tokens_left=9)])
    loop: Any = Loop(stepper, scheduler, None, policy)  # type: ignore[arg-type]
    others = [replace(ahead, full_logits=True), replace(ahead, batch=2), replace(ahead, rows=4)]
    for context in (ahead, *others):
        loop._choose_ahead()
        chosen = loop._chosen[1]
        assert (loop._shape(context) is chosen) == (context is ahead)
        assert loop._chosen is None
    assert loop._shape(replace(ahead, full_logits=True)).draft_depth == 2
