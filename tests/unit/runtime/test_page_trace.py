"""A trace of pages, replayed: on every line, free and held pages together are all pages."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loop import Visit, serve, visits
from test_on_demand import ENGINES, few
from toy_engine import prompt, run, toy_engine
from toy_plan import SHAPES

from specbuild.cli.terminal.engine_loading import traced
from specbuild.runtime.cache import page_trace
from specbuild.runtime.cache.page_trace import PageTrace
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.settings import PrefillSchedule

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from trace_replay import replay

PROMPTS = [[1, 2, 3], [4] * 9, [5, 6]]
PARAMS = GenerateParams(max_new_tokens=9, ignore_eos=True)


@pytest.mark.parametrize("kind", ENGINES)
@settings(max_examples=4, deadline=None)
@given(
    st.lists(visits, min_size=2, max_size=7),
    st.sampled_from([None, *SHAPES]),
    st.integers(20, 30),
)
def test_every_page_has_one_owner_at_every_line(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    visitors: list[Visit],
    shape: object,
    pages: int,
) -> None:
    engine, file = few(kind, pages), tmp_path_factory.mktemp("trace") / "trace.jsonl"
    with PageTrace(file) as trace:
        engine.trace_pages(trace)
        _, ends = serve(engine, visitors, shape, PrefillSchedule())  # type: ignore[arg-type]
    lines = file.read_text().splitlines()
    found = replay(lines)
    told = [json.loads(line) for line in lines]
    ended = {
        line["request"]: line["event"] for line in told if line["event"] in ("abort", "finish")
    }
    assert ended == {
        str(i): "abort" if end.record.finish_reason == "abort" else "finish"
        for i, end in ends.items()
    }
    left = sum(line["owner"] is None for line in told if line["event"] == "abort")
    ends_of_owners = found.events["finish"] + found.events["abort"] - left
    assert len(found.admitted) == ends_of_owners + found.events["preempt"]
    preemptions = sum(end.record.stats.preemptions for end in ends.values())
    assert found.events["preempt"] == preemptions
    assert [line["t"] for line in told] == sorted(line["t"] for line in told)


def test_a_trace_that_lacks_a_line_does_not_replay(tmp_path: Path) -> None:
    engine, file = toy_engine(), tmp_path / "trace.jsonl"
    with PageTrace(file) as trace:
        engine.trace_pages(trace)
        run(engine, PROMPTS, PARAMS)
    lines = file.read_text().splitlines()
    replay(lines)
    moves = [i for i, line in enumerate(lines) if '"install"' in line or '"release"' in line]
    for i in moves[:: max(1, len(moves) // 12)]:
        with pytest.raises(ValueError, match=r"line \d+|held at the end"):
            replay(lines[:i] + lines[i + 1 :])


@pytest.mark.parametrize("kind", ENGINES)
def test_a_failed_command_leaves_a_complete_trace(kind: str, tmp_path: Path) -> None:
    """Even if the events are not read to the end, and the engine is in the middle of a step."""
    engine, file = few(kind), tmp_path / "trace.jsonl"
    params = replace(PARAMS, max_new_tokens=40)
    events = engine.generate([prompt(ids) for ids in PROMPTS], params, speculation=None)
    with pytest.raises(BrokenPipeError), traced(engine, file):
        next(events)
        raise BrokenPipeError
    found = replay(file.read_text().splitlines())
    assert found.events["abort"] + found.events["finish"] == len(PROMPTS) and not found.held


def test_rejects_a_trace_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the trace cannot be written"):
        PageTrace(tmp_path / "nowhere" / "trace.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_trace_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(page_trace.log, "warning", lambda text, *_: said.append(text))
    engine = toy_engine()
    undisturbed = run(toy_engine(), PROMPTS, PARAMS).ids
    with PageTrace(Path("/dev/full")) as trace:
        engine.trace_pages(trace)
        assert run(engine, PROMPTS, PARAMS).ids == undisturbed
    assert said == ["the trace ends here: %s"]


def test_the_queue_for_a_slow_disk_is_bounded_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_trace, "MAX_QUEUED_LINES", 3)
    monkeypatch.setattr(page_trace, "_WRITE_INTERVAL_S", 60.0)
    file = tmp_path / "trace.jsonl"
    with PageTrace(file) as trace:
        for i in range(10):
            trace.add("admit", owner=i, request=None)
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("owner") for line in told] == [0, 1, 2, None]
    assert told[-1] == {"event": "lost", "lines": 7}
    with pytest.raises(ValueError, match="lost"):
        replay(file.read_text().splitlines())


def test_a_line_costs_the_engine_little(tmp_path: Path) -> None:
    with PageTrace(tmp_path / "trace.jsonl") as trace:
        started_s = time.thread_time()
        for i in range(2000):
            trace.add("install", owner=i, group="full", pages=(i,), free=i)
        assert time.thread_time() - started_s < 2000 * 50e-6
