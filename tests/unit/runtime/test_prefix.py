"""The prefix cache: prompts with a common prefix share pages, and outputs do not change."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples
from test_loop import Visit, serve
from toy_device import toy_cuda
from toy_engine import CACHING, prompt, run, toy_engine
from toy_model import VOCAB, decode_plainly
from toy_plan import SHAPES

from specbuild.runtime.cache.page_pool import PagePool
from specbuild.runtime.cache.page_trace import PageTrace
from specbuild.runtime.cache.resume_points import ResumePoints
from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.device.stepper import DeviceStepper
from specbuild.runtime.decode.host.stepper import HostStepper
from specbuild.runtime.decode.scheduler import Chunk
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import UnsupportedHereError
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from trace_replay import replay

SIZE = 4
LONG = [[i % (VOCAB - 1) for i in range(n, n + 40)] for n in (0, 3)]


ENGINES: dict[str, Callable[..., Engine]] = {
    "host": toy_engine,
    "device": lambda *settings, **options: toy_cuda(*settings, **options).engine,
}
STEPPERS = {"host": HostStepper, "device": DeviceStepper}
on_both = pytest.mark.parametrize("kind", ENGINES)


def keeping(kind: str = "host", **options: Any) -> Engine:
    """Return a toy engine with a prefix cache. Unused pages are poisoned."""
    generated, policy = options.pop("publish_generated", False), "guaranteed-no-evict"
    if options.pop("on_demand", False):
        policy = "max-utilization"
    settings = RuntimeSettings(
        prefix_caching="on", publish_generated_pages=generated, kv_policy=policy
    )
    return ENGINES[kind](settings, **options)


# Prompts that begin as one of two do, or as an answer to them, and go on by themselves.
begun = st.builds(
    lambda which, shared, rest: [*LONG[which][:shared], *rest],
    st.sampled_from([0, 1]),
    st.integers(0, 38),
    st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=6),
)
visits = st.builds(
    Visit,
    ids=begun,
    tokens=st.integers(1, 12),
    turn=st.integers(0, 12),
    leaves=st.one_of(st.none(), st.none(), st.integers(0, 16)),
    sampling=st.builds(SamplingParams, temperature=st.sampled_from([0.0, 1.0]), seed=st.just(7)),
)


@on_both
@examples(25)
@given(
    st.lists(st.lists(visits, min_size=1, max_size=6), min_size=1, max_size=3),
    st.lists(st.sampled_from([None, *SHAPES]), min_size=3, max_size=3),
    st.sampled_from([20, 26, None]),
    st.booleans(),
    st.sampled_from([0, 0, 5]),
)
def test_requests_in_a_batch_have_the_tokens_that_they_have_alone(
    kind: str,
    rounds: list[list[Visit]],
    shapes: list[DraftShape | None],
    pages: int | None,
    generated: bool,
    draft_window: int,
) -> None:
    """With and without drafts, with few and many pages. The draft sees everything, or a window."""
    engine = keeping(
        kind,
        kv_pages=pages,
        on_demand=pages is not None,
        publish_generated=generated,
        draft_window=draft_window,
    )
    prefixes = engine.prefixes
    assert prefixes is not None
    for visitors, shape in zip(rounds, shapes, strict=False):
        tokens, ends = serve(engine, visitors, shape, PrefillSchedule())
        for i, visitor in enumerate(visitors):
            alone = decode_plainly(visitor.ids, visitor.tokens, visitor.sampling)
            cut = ends[i].record.finish_reason == "abort"
            assert tokens[i] == (alone[: len(tokens[i])] if cut else alone)
        prefixes.check_integrity()


def test_a_trace_has_the_sharers_of_a_page(tmp_path: Path) -> None:
    engine, file = keeping(), tmp_path / "trace.jsonl"
    with PageTrace(file) as trace:
        engine.trace_pages(trace)
        for _ in range(2):
            run(engine, [LONG[0], LONG[0]], GenerateParams(max_new_tokens=5))
    found = replay(file.read_text().splitlines())
    assert found.events["share"] > 0 and not found.held


@on_both
@examples(25)
@given(
    st.lists(st.tuples(begun, st.sampled_from([None, "a", "b"])), min_size=2, max_size=6),
    st.sampled_from([None, SHAPES[1]]),
)
def test_finds_the_longest_cached_prefix(
    kind: str, asked: list[tuple[list[int], str | None]], shape: DraftShape | None
) -> None:
    """Compared with all earlier prompts, page by page. Drafting requests need the next token."""
    engine = keeping(kind, max_batch_size=40)
    seen: list[tuple[list[int], str | None]] = []
    for ids, salt in asked:
        params = GenerateParams(max_new_tokens=2, cache_salt=salt, ignore_eos=True)
        stats = run(engine, [ids], params, speculation=shape).records[0].stats
        found = 0
        for other, others_salt in seen:
            pages = 0
            while (
                others_salt == salt
                and (pages + 1) * SIZE < min(len(ids), len(other))
                and ids[: (pages + 1) * SIZE + 1] == other[: (pages + 1) * SIZE + 1]
            ):
                pages += 1
            found = max(found, pages * SIZE)
        assert stats.cached_tokens == found
        seen.append((ids, salt))
    assert engine.prefixes is not None
    statistics = engine.prefixes.statistics
    assert statistics.queries == len(asked) == statistics.hits + statistics.misses
    assert statistics.query_tokens == sum(len(ids) for ids, _ in asked)


@on_both
@pytest.mark.parametrize("draft_window", [0, 5])
@pytest.mark.parametrize("shape", [None, *SHAPES])
def test_a_hit_accepts_the_drafts_of_a_cold_run(
    kind: str, shape: DraftShape | None, draft_window: int
) -> None:
    params = GenerateParams(max_new_tokens=14, ignore_eos=True)
    engine, ids = keeping(kind, draft_window=draft_window), LONG[0]
    cold = run(engine, [ids], params, speculation=shape).records[0]
    warm = run(engine, [ids], params, speculation=shape).records[0]
    assert warm.stats.cached_tokens == 36 and cold.stats.cached_tokens == 0
    assert (warm.output_ids, warm.logprobs) == (cold.output_ids, cold.logprobs)
    assert warm.stats.acceptance_histogram == cold.stats.acceptance_histogram


@pytest.mark.parametrize(("kind", "kept"), [("host", 48), ("device", 44)])
def test_pages_of_outputs_are_cached_if_requested(kind: str, kept: int) -> None:
    """On a device the newest tokens are pending until a step lets the draft ingest them."""
    for generated, found in ((False, 36), (True, kept)):
        engine = keeping(kind, publish_generated=generated)
        params = GenerateParams(max_new_tokens=12, ignore_eos=True)
        answer = run(engine, [LONG[0]], params, speculation=SHAPES[1]).ids[0]
        turn = [*LONG[0], *answer, 1, 2]
        again = run(engine, [turn], GenerateParams(max_new_tokens=3), speculation=SHAPES[1])
        assert again.records[0].stats.cached_tokens == found
        assert again.ids[0] == decode_plainly(turn, 3, SamplingParams())


@pytest.mark.parametrize(
    ("kind", "expected"), [("host", [0, 0, 36, 36]), ("device", [0, 36, 36, 36])]
)
def test_pages_without_draft_entries_are_found_by_requests_without_drafts(
    kind: str, expected: list[int]
) -> None:
    """On a device prompts always enter the draft's cache."""
    engine = keeping(kind)
    params = GenerateParams(max_new_tokens=2, ignore_eos=True)
    found = [
        run(engine, [LONG[0]], params, speculation=shape).records[0].stats.cached_tokens
        for shape in (None, SHAPES[1], None, SHAPES[1])
    ]
    assert found == expected


def rows_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the prompt rows of each launch of prompts."""
    rows: list[int] = []
    start = STEPPERS[kind].start_prompts

    def counted(stepper: Any, chunks: Sequence[Chunk]) -> None:
        rows.append(sum(chunk.count for chunk in chunks))
        start(stepper, chunks)

    monkeypatch.setattr(STEPPERS[kind], "start_prompts", counted)
    return rows


@on_both
@pytest.mark.parametrize("shape", [None, SHAPES[1]])
@pytest.mark.parametrize("tokens", [1, 9])
def test_choices_of_a_prompt_read_it_once(
    kind: str, shape: DraftShape | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another prompt continues meanwhile. Each choice computes pages that are not full itself."""
    sampling = [SamplingParams(temperature=1.0, seed=seed) for seed in range(4)]
    params = [GenerateParams(max_new_tokens=tokens, sampling=each) for each in sampling]
    prompts = [LONG[0]] * 3 + [LONG[1]]
    alone = [decode_plainly(p, tokens, s) for p, s in zip(prompts, sampling, strict=True)]
    for engine, wanted in ((keeping(kind), 2 * 40 + 2 * 4), (ENGINES[kind](), 4 * 40)):
        with monkeypatch.context() as patch:
            rows = rows_read(kind, patch)
            assert run(engine, prompts, params, speculation=shape).ids == alone
        assert sum(rows) == wanted


@pytest.mark.parametrize("left", range(1, 6))
def test_the_next_choice_continues_the_prompt_of_a_released_one(left: int) -> None:
    """Nothing is computed twice, and no sequence waits for a released one."""
    engine = keeping()
    visitors = [
        Visit(LONG[0], 6, 0, left if seed == 0 else None, SamplingParams(1.0, seed=seed))
        for seed in range(3)
    ]
    tokens, ends = serve(engine, visitors, SHAPES[1], PrefillSchedule(max_rows=8))
    for i in (1, 2):
        assert tokens[i] == decode_plainly(LONG[0], 6, visitors[i].sampling)
    cached = [ends[i].record.stats.cached_tokens for i in range(3)]
    # The first one reads eight tokens a turn; of its last page the next token is not known.
    assert cached == [0, min(8 * left, 36), 36]


def test_requests_with_other_prompts_overtake_waiting_choices() -> None:
    engine = keeping()
    requests = engine.check_prompts([prompt(ids) for ids in (LONG[0], LONG[0], LONG[1])])
    loop = engine.decoder.loop(
        DraftSetting(None), text_stream=engine._text_stream, prefill=PrefillSchedule(max_rows=8)
    )
    for request in requests:
        loop.add(request)
    with closing(loop):
        loop.open()
        loop.turn()
        assert [sequence.index for sequence in loop._scheduler.sequences] == [0, 2]
        while len(loop._scheduler.sequences) < 3:
            loop.turn()
        assert loop._scheduler.sequences[-1].counters.cached_tokens == 36


@on_both
def test_prompts_of_different_salts_have_no_common_pages(kind: str) -> None:
    """The scheduler lets a prompt wait for another that shares its first pages."""
    cache = keeping(kind).prefixes
    assert cache is not None
    ids = np.array(LONG[0], np.int32)
    one, same = cache.begin(ids, "a"), cache.begin(ids.copy(), "a")
    assert cache.common_pages(one, same) == (len(ids) - 1) // cache.page_size > 0
    for salt in ("b", None):
        assert cache.common_pages(one, cache.begin(ids.copy(), salt)) == 0


def beginnings(count: int) -> list[list[int]]:
    """Return prompts of 40 tokens that differ from the first token on."""
    tokens = np.random.default_rng(1).integers(0, VOCAB - 1, (count, 39)).tolist()
    return [[first, *rest] for first, rest in enumerate(tokens)]


def cached(engine: Engine, ids: list[int]) -> int:
    """Return the cached length of a prompt, which is cached from now on."""
    params = GenerateParams(max_new_tokens=9, ignore_eos=True)
    return run(engine, [ids], params, speculation=SHAPES[1]).records[0].stats.cached_tokens


def test_as_many_beginnings_stay_as_have_room_for_a_window_each() -> None:
    """48 pages: of each prompt of ten pages, the two that the next turn needs stay longest."""
    engine = keeping(max_batch_size=8, kv_pages=400)
    prompts = beginnings(14)
    assert [cached(engine, ids) for ids in prompts] == [0] * 14
    assert [cached(engine, [*ids, 5, 6, 7]) for ids in prompts] == [36] * 14
    assert engine.prefixes is not None
    engine.prefixes.check_integrity()


def test_pages_of_a_window_are_kept_at_the_end_of_a_shared_prefix() -> None:
    """The pages that the second prompt needs there are evicted first; the third finds them."""
    engine = keeping(max_batch_size=8, kv_pages=400)
    first, *others = beginnings(20)
    parted = [[*first[:21], 27 - i, *others[i][:18]] for i in range(2)]
    found = []
    for ids, between in ((first, others[:9]), (parted[0], others[9:]), (parted[1], [])):
        found.append(cached(engine, ids))
        for other in between:
            cached(engine, other)
    assert found == [0, 0, 20]


def test_pages_of_no_resume_point_are_evicted_first() -> None:
    pool, gone = PagePool("sliding", 7), []
    pool.on_evict = gone.append
    ends = ResumePoints(pool)
    pool.reserve(6)
    pages = [pool.allocate(1) for _ in range(6)]
    pool.cache(np.array(pages), evict_first=True)
    ends.add((1, 2), pages[:2])
    ends.add((2, 3), pages[1:3])
    ends.check_integrity()
    pool.release(pages, 1)
    pool.unreserve(6)
    assert [pool.allocate(2) for _ in range(3)] == gone == pages[3:]
    ends.remove((1, 2))
    ends.check_integrity()
    assert pool.allocate(2) == pages[0]
    assert pool.evict_last_pages == set(pages[1:3])
    pool.on_evict = lambda page: (gone.append(page), ends.remove_page(page))[0]
    assert [pool.allocate(2) for _ in range(2)] == pages[1:3] and not pool.evict_last_pages


def test_rejects_prefix_caching_if_pages_cannot_be_shared() -> None:
    engine = toy_engine()
    able = dataclasses.replace(engine.executor.capabilities, fixed_pages=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine.executor), "capabilities", able)
        auto = RuntimeSettings(prefix_caching="auto")
        assert Engine(engine.manifest, engine.executor, auto).prefixes is None
        for settings in (CACHING, dataclasses.replace(auto, publish_generated_pages=True)):
            with pytest.raises(UnsupportedHereError, match="keep their pages to themselves"):
                Engine(engine.manifest, engine.executor, settings)
