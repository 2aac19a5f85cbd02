"""Pages on demand: with few pages each request has the output that it has alone, and ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples
from test_loop import Visit, pages_of, serve, visits
from toy_device import toy_cuda
from toy_engine import ON_DEMAND, prompt, toy_engine
from toy_model import decode_plainly, toy_manifest
from toy_plan import SHAPES

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.decode import scheduler
from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.host.stepper import replace_replayed
from specbuild.runtime.decode.loop import Loop
from specbuild.runtime.decode.on_demand import PageChanges, _preempt, provide_pages
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.lossy.mode import Verified
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, SequenceState, TokenEvent
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import DEFAULT_SETTINGS, PrefillSchedule

# A sequence of 64 tokens and its tree takes 20 pages of 4.
PAGES = 22
ENGINES: dict[str, Callable[..., Engine]] = {
    "host": toy_engine,
    "device": lambda *settings, **options: toy_cuda(*settings, **options).engine,
}
SEVERAL = [Visit([i, 3, 1], 30, 0, None, SamplingParams(i % 2, seed=i)) for i in range(4)]


def few(kind: str, pages: int = PAGES) -> Engine:
    return ENGINES[kind](ON_DEMAND, kv_pages=pages, max_batch_size=4)


def records_of(
    engine: Engine, shape: DraftShape | None, loop: Loop | None = None
) -> list[RunRecord]:
    """Return the records of SEVERAL requests that run together."""
    loop = loop or engine.decoder.loop(DraftSetting(shape), text_stream=engine._text_stream)
    for visit in SEVERAL:
        params = GenerateParams(
            max_new_tokens=visit.tokens, sampling=visit.sampling, ignore_eos=True
        )
        loop.add(engine.check_prompts([prompt(visit.ids)], params)[0])
    emitted: dict[int, list[int]] = {}
    found: dict[int, RunRecord] = {}
    for event in loop.run():
        if isinstance(event, TokenEvent):
            emitted.setdefault(event.request, []).append(event.token_id)
        else:
            found[event.request] = event.record
    assert [emitted[i] for i in range(4)] == [list(found[i].output_ids) for i in range(4)]
    return [found[i] for i in range(4)]


@pytest.mark.parametrize("kind", ENGINES)
@examples(10)
@given(
    st.lists(visits, min_size=2, max_size=7),
    st.sampled_from([None, *SHAPES]),
    st.builds(PrefillSchedule, st.sampled_from([None, 3]), st.integers(0, 2)),
    st.integers(20, 30),
)
def test_few_pages_change_no_token(
    kind: str, visitors: list[Visit], shape: DraftShape | None, prefill: PrefillSchedule, pages: int
) -> None:
    tokens, ends = serve(few(kind, pages), visitors, shape, prefill)
    assert set(ends) == set(range(len(visitors)))
    for i, visitor in enumerate(visitors):
        alone = decode_plainly(visitor.ids, visitor.tokens, visitor.sampling)
        record = ends[i].record
        assert list(record.output_ids) == tokens[i]
        assert len(record.logprobs or ()) == record.stats.output_tokens == len(tokens[i])
        cut = record.finish_reason == "abort"
        assert tokens[i] == (alone[: len(tokens[i])] if cut else alone)


@pytest.mark.parametrize("shape", [None, SHAPES[3]])
@pytest.mark.parametrize("kind", ENGINES)
def test_preemption_does_not_change_the_record(kind: str, shape: DraftShape | None) -> None:
    engine, whole = few(kind), ENGINES[kind](max_batch_size=4)
    free = pages_of(engine)
    found, undisturbed = records_of(engine, shape), records_of(whole, shape)
    assert pages_of(engine) == free
    preemptions = [record.stats.preemptions for record in found]
    assert preemptions[0] == 0, "the oldest goes on"
    assert sum(preemptions) > 0
    assert sum(record.stats.paused_steps for record in found) > 0
    for got, wanted in zip(found, undisturbed, strict=True):
        assert (got.output_ids, got.logprobs) == (wanted.output_ids, wanted.logprobs)
        assert wanted.stats.preemptions == wanted.stats.paused_steps == 0


@pytest.mark.parametrize("kind", ENGINES)
def test_ten_preemptions_do_not_change_the_record(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any time: in its prompt, during replay, or with steps in flight."""
    shape = SHAPES[2]
    launches = iter(range(10**6))

    def preempting(
        running: list[SequenceState], kv: KvPools, *, max_step_tokens: int
    ) -> PageChanges:
        """The youngest sequence loses its pages at every other launch."""
        changes, youngest = provide_pages(running, kv, max_step_tokens=max_step_tokens), running[-1]
        told = (*changes.grown, *changes.paused, *changes.resumed)
        if next(launches) % 2 and youngest.counters.preemptions < 10 and youngest not in told:
            _preempt(running.pop(), kv, changes)
        return changes

    undisturbed = records_of(ENGINES[kind](max_batch_size=4), shape)
    engine = few(kind, 60)
    free = pages_of(engine)
    monkeypatch.setattr(scheduler, "provide_pages", preempting)
    found = records_of(engine, shape)
    assert pages_of(engine) == free
    assert max(record.stats.preemptions for record in found) == 10
    for got, wanted in zip(found, undisturbed, strict=True):
        assert (got.output_ids, got.logprobs) == (wanted.output_ids, wanted.logprobs)


@pytest.mark.parametrize("kind", ENGINES)
def test_aborting_a_preempted_request_returns_its_tokens(kind: str) -> None:
    engine = few(kind)
    free = pages_of(engine)
    loop = engine.decoder.loop(DraftSetting(SHAPES[1]), text_stream=engine._text_stream)
    params = GenerateParams(max_new_tokens=40, ignore_eos=True)
    for request in engine.check_prompts([prompt([i, 3]) for i in range(4)], params):
        loop.add(request)
    loop.open()
    given_tokens: dict[int, list[int]] = {i: [] for i in range(4)}
    ends: dict[int, FinishEvent] = {}
    while not loop.idle:
        waiting = [w for w in loop._scheduler._waiting if w.preempted is not None]
        again = [s for s in loop._scheduler.sequences if s.replay_remaining]
        leaving = (
            waiting[-1].index if waiting else again[0].index if len(ends) == 1 and again else None
        )
        if leaving is not None and len(ends) < 2:
            ended = loop.abort(leaving)
            assert ended is not None
            ends[leaving] = ended
            assert list(ended.record.output_ids) == given_tokens[leaving]
        for event in loop.turn():
            if isinstance(event, TokenEvent):
                given_tokens[event.request].append(event.token_id)
            else:
                ends[event.request] = event
    loop.close()
    assert pages_of(engine) == free
    assert [e.record.finish_reason for e in ends.values()].count("abort") >= 1
    for i, end in ends.items():
        plain = decode_plainly([i, 3], 40, params.sampling)
        mine = list(end.record.output_ids)
        assert mine == given_tokens[i] and mine[: len(plain)] == plain[: len(mine)]


def test_a_replay_with_other_tokens_is_an_internal_error() -> None:
    engine = few("device")
    loop = engine.decoder.loop(DraftSetting(None), text_stream=engine._text_stream)
    restore = loop._emission.restore

    def altered(preempted: SequenceState, pages: object) -> SequenceState:
        preempted.ids[preempted.num_tokens - 1] += 1
        return restore(preempted, pages)  # type: ignore[arg-type]

    loop._emission.restore = altered  # type: ignore[method-assign]
    with pytest.raises(SpecbuildError, match="internal error"):
        records_of(engine, None, loop)


@pytest.mark.parametrize(
    ("recorded", "accepted", "tokens"),
    [
        ([7, 8, 9], 2, [7, 8, 9]),
        ([7, 5, 9], 1, [7, 5]),
        ([4], 0, [4]),
        ([7, 8, 9, 1], 2, [7, 8, 9]),
    ],
)
def test_replay_uses_recorded_tokens_if_bits_may_differ(
    recorded: list[int], accepted: int, tokens: list[int]
) -> None:
    """A tree whose path 0 → 2 → 3 samples 7, 8 and 9."""
    engine = few("host")
    request = engine.check_prompts([prompt([1, 2])])[0]
    loop = engine.decoder.loop(DraftSetting(None), text_stream=engine._text_stream)
    sequence = loop._emission.admit(0, request, {})
    sequence.ids[2 : 2 + len(recorded)] = recorded
    sequence.replay_until = 2 + len(recorded)
    sampled, path = np.array([[7, 0, 8, 9]]), np.array([[0, 2, 3, -1]])
    given_ = Verified(sampled, sampled, path, [2], path, path, {}, False, False)
    found = replace_replayed([sequence], given_)
    assert found.accepted == [accepted]
    slots = found.path[0, : accepted + 1]
    assert found.sampled[0, slots].tolist() == tokens
    assert (found.path[0, accepted + 1 :] == -1).all()
    assert given_.accepted == [2] and sampled.tolist() == [[7, 0, 8, 9]]


def test_pages_are_reserved_if_preemption_is_impossible() -> None:
    manifest = toy_manifest(kv_pages=PAGES)
    assert ON_DEMAND.allocates_on_demand(manifest)
    assert not DEFAULT_SETTINGS.allocates_on_demand(manifest)
    assert not ON_DEMAND.allocates_on_demand(toy_manifest())
    assert not ON_DEMAND.allocates_on_demand(replace(manifest, dsa=object()))  # type: ignore[arg-type]
