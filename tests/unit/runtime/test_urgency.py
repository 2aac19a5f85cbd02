"""Priorities and deadlines: which request runs first, how often it is overtaken, what is late."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_loop import ENGINES, pages_of
from test_on_demand import few
from toy_engine import prompt
from toy_model import decode_plainly
from toy_plan import SHAPES

from specbuild.runtime.decode import request_queue
from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.request_queue import QueuedRequest, RequestQueue
from specbuild.runtime.engine import Engine
from specbuild.runtime.request import FinishEvent, GenerateParams, Request, TokenEvent

PARAMS = GenerateParams(max_new_tokens=12, ignore_eos=True)
MOST = 3


class Model:
    """The rule by counting: a request that was overtaken MOST times precedes all others."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.priorities: dict[int, int] = {}
        self.times_overtaken: dict[int, int] = {}

    def add(self, index: int, priority: int) -> None:
        self.waiting.append(index)
        self.priorities[index] = priority
        self.times_overtaken.setdefault(index, 0)

    def take(self) -> int:
        urgent = [i for i in self.waiting if self.times_overtaken[i] >= MOST]
        best = min(self.priorities[i] for i in self.waiting)
        equals = urgent or [i for i in self.waiting if self.priorities[i] == best]
        taken = min(equals)
        self.waiting.remove(taken)
        for i in self.waiting:
            self.times_overtaken[i] += i < taken
        return taken


operations = st.one_of(st.integers(-2, 2), st.sampled_from(["take", "take", "leave", "preempt"]))


@settings(max_examples=150, deadline=None)
@example(
    [0, 0, -1, -1, "take", "take", "take", "preempt", "preempt", "take", "take"], random.Random(0)
)
@given(st.lists(operations, max_size=60), st.randoms(use_true_random=False))
def test_the_queue_follows_the_rule(given_ops: list[int | str], drawn: object) -> None:
    before, request_queue.MAX_OVERTAKES = request_queue.MAX_OVERTAKES, MOST
    try:
        queue, model, taken = RequestQueue(), Model(), []
        for added, operation in enumerate(given_ops):
            if isinstance(operation, int):
                request = Request(str(added), (1,), PARAMS, 1, operation)
                queue.add(QueuedRequest(added, request))
                model.add(added, operation)
            elif operation == "preempt" and taken:
                # It returns with its age and its urgency.
                again = taken.pop(drawn.randrange(len(taken)))  # type: ignore[attr-defined]
                queue.add(
                    QueuedRequest(again.index, again.request, times_overtaken=again.times_overtaken)
                )
                model.add(again.index, again.request.priority)
            elif operation == "leave" and len(queue):
                gone = drawn.choice(model.waiting)  # type: ignore[attr-defined]
                model.waiting.remove(gone)
                left = queue.remove(gone)
                assert left is not None and left.index == gone
                assert queue.remove(gone) is None
            elif operation == "take" and len(queue):
                first = queue.first
                queue.take(first)
                assert first.index == model.take()
                taken.append(first)
            assert sorted(entry.index for entry in queue) == sorted(model.waiting)
        assert all(model.times_overtaken[i] <= MOST for i in model.times_overtaken)
    finally:
        request_queue.MAX_OVERTAKES = before


def requests_of(engine: Engine, count: int) -> list[Request]:
    return engine.check_prompts([prompt([i, 3], str(i)) for i in range(count)], PARAMS)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_preempted_request_keeps_its_overtaken_count(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, add = RequestQueue.take, RequestQueue.add
    left: dict[int, int] = {}
    returned: list[tuple[int, int]] = []

    def taken(queue: RequestQueue, entry: QueuedRequest) -> None:
        left[entry.index] = entry.times_overtaken
        take(queue, entry)

    def added(queue: RequestQueue, entry: QueuedRequest) -> None:
        if entry.preempted is not None:
            returned.append((left[entry.index], entry.times_overtaken))
        add(queue, entry)

    monkeypatch.setattr(RequestQueue, "take", taken)
    monkeypatch.setattr(RequestQueue, "add", added)
    engine = few(kind, 24)
    loop = engine.decoder.loop(DraftSetting(None), text_stream=engine._text_stream)
    for request, priority in zip(requests_of(engine, 6), [5, 5, 1, 1, 0, 0], strict=True):
        loop.add(replace(request, priority=priority))
    assert len([event for event in loop.run() if isinstance(event, FinishEvent)]) == 6
    assert any(before for before, _ in returned)
    assert all(before == after for before, after in returned)


@pytest.mark.parametrize("kind", ENGINES)
def test_lower_priorities_are_served_first_and_equal_ones_in_order(kind: str) -> None:
    engine = few(kind, 24)
    loop = engine.decoder.loop(DraftSetting(None), text_stream=engine._text_stream)
    priorities = [0, 5, -1, 5, 0, -1]
    admitted: list[int] = []
    admit = loop._admit
    loop._admit = lambda *of: admitted.append(of[0].index) or admit(*of)  # type: ignore[method-assign, func-returns-value]
    for request, priority in zip(requests_of(engine, 6), priorities, strict=True):
        loop.add(replace(request, priority=priority))
    ids: dict[int, list[int]] = {i: [] for i in range(6)}
    preempted: dict[int, int] = {}
    for event in loop.run():
        if isinstance(event, TokenEvent):
            ids[event.request].append(event.token_id)
        else:
            preempted[event.request] = event.record.stats.preemptions
    first_time = list(dict.fromkeys(admitted))
    assert first_time == [2, 5, 0, 4, 1, 3]
    assert preempted[2] == 0, "the highest priority goes on"
    for i in range(6):
        plain = decode_plainly([i, 3], 12, PARAMS.sampling)
        assert ids[i][: len(plain)] == plain


@pytest.mark.parametrize("shape", [None, SHAPES[2]])
@pytest.mark.parametrize("kind", ENGINES)
def test_a_late_request_ends_with_its_tokens(
    kind: str, shape: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ENGINES[kind]()
    free, most = pages_of(engine), engine.manifest.limits.max_batch_size
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    loop = engine.decoder.loop(DraftSetting(shape), text_stream=engine._text_stream)  # type: ignore[arg-type]
    limits = [None, now_s + 5, now_s + 5, now_s - 1, None, now_s + 5][: most + 3]
    for request, limit_s in zip(requests_of(engine, len(limits)), limits, strict=False):
        loop.add(replace(request, deadline_s=limit_s))
    loop.open()
    ids: dict[int, list[int]] = {i: [] for i in range(len(limits))}
    ends: dict[int, FinishEvent] = {}
    turns = 0
    while not loop.idle:
        turns += 1
        if turns == 4:
            now_s += 6
        for event in loop.turn():
            if isinstance(event, TokenEvent):
                ids[event.request].append(event.token_id)
            else:
                ends[event.request] = event
    loop.close()
    assert pages_of(engine) == free
    for i, limit_s in enumerate(limits):
        late = ends[i].record.finish_reason == "deadline"
        assert late or ends[i].record.finish_reason == "length"
        assert limit_s is not None or not late
        assert list(ends[i].record.output_ids) == ids[i]
        plain = decode_plainly([i, 3], 12, PARAMS.sampling)
        assert ids[i][: len(plain)] == plain[: len(ids[i])]
    assert ids[3] == [] and ends[3].record.finish_reason == "deadline"
    assert any(end.record.finish_reason == "deadline" and ids[i] for i, end in ends.items())


def test_a_loop_with_late_requests_only_is_idle() -> None:
    make: Callable[[], Engine] = ENGINES["host"]
    engine = make()
    loop = engine.decoder.loop(DraftSetting(None), text_stream=engine._text_stream)
    for request in requests_of(engine, 3):
        loop.add(replace(request, deadline_s=time.monotonic() - 1))
    events = list(loop.run())
    assert [type(event) for event in events] == [FinishEvent] * 3
