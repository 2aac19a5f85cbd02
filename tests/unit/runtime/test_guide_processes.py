"""Guides in separate processes: the death of a process is an error of one guide."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from left_out import examples
from test_guide_limits import vocabulary
from test_guides import PROMPTS, SHAPES, samplings
from toy_device import toy_cuda
from toy_engine import ON_DEMAND, run
from toy_language import Language, decode_masked, guided_engine, knowing_letters, languages

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides import grammar
from specbuild.runtime.guides.compiler import GrammarCompiler
from specbuild.runtime.guides.grammar import Grammar, GuideState
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.guides.remote import MAX_FOLLOWERS, RemoteGrammar, RemoteGuideState
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

# llguidance's converter needs minutes for it.
_RULES = "\n".join(f'b{i} ::= b{i + 1} | "x"' for i in range(10_000))
SLOW = Guide.grammar(f'root ::= b0\n{_RULES}\nb10000 ::= "y"', name="guided_grammar")
FORMS = [
    Guide.choice(["x" + "abc " * 10_000]),
    Guide.grammar('start: "q" r0 | "z"\n'
                  + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(14))
                  + '\nr14: "abc"'),
]  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary(), isolated=True)
    yield compiler
    compiler.close()


def test_a_small_guide_is_followed_here(compiler: GrammarCompiler) -> None:
    made = compiler.compile(Guide.regex("[ab]{3}"))
    assert isinstance(made, Grammar) and not made.begin().is_remote
    assert compiler.compile(Guide.regex("[ab]{3}")) is made
    for guide, reason in [
        (Guide.regex("(a", name="guided_regex"), "guided_regex cannot be compiled"),
        (Guide.grammar("start: missing", name="f"), "f cannot be compiled.*missing"),
    ]:
        with pytest.raises(RequestError, match=reason) as caught:
            compiler.compile(guide)
        assert caught.value.field == guide.name


def test_the_processor_time_of_a_guide_is_limited_and_others_compile_meanwhile(
    compiler: GrammarCompiler,
) -> None:
    errors: list[RequestError] = []

    def compile_slow() -> None:
        with pytest.raises(RequestError) as caught:
            compiler.compile(SLOW)
        errors.append(caught.value)

    before = os.times()
    thread = threading.Thread(target=compile_slow)
    thread.start()
    compiler.compile(Guide.regex("a{7}"))
    assert thread.is_alive()
    thread.join()
    (error,) = errors
    assert str(error) == "guided_grammar takes more than 2 seconds of processor time to compile"
    # This process computed no part of it.
    assert os.times().user - before.user < 1


def workers(process: int) -> list[int]:
    """Return the processes that compute: grandchildren of the one with the tokenizer."""

    def children(parent: int) -> list[int]:
        found = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = status.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                found.append(int(status.parent.name))
        return found

    return [worker for child in children(process) for worker in children(child)]


def test_a_killed_process_fails_its_guide_only() -> None:
    compiler = GrammarCompiler(vocabulary(), isolated=True)
    compiler.compile(Guide.regex("a"))
    assert compiler._checker is not None and compiler._checker._process is not None
    holder = compiler._checker._process
    errors: list[RequestError] = []

    def compile_slow() -> None:
        with pytest.raises(RequestError) as caught:
            compiler.compile(SLOW)
        errors.append(caught.value)

    for died, reason in [(signal.SIGSEGV, "nested too deeply"), (signal.SIGABRT, "MiB of memory")]:
        limit_s = time.monotonic() + 20
        while workers(holder.pid) and time.monotonic() < limit_s:
            time.sleep(0.01)  # that of the last guide ends
        thread = threading.Thread(target=compile_slow)
        thread.start()
        while not (found := workers(holder.pid)) and time.monotonic() < limit_s:
            time.sleep(0.01)
        os.kill(found[0], died)
        thread.join()
        assert reason in str(errors.pop())
    # Where the process with the tokenizer dies another one is started.
    holder.kill()
    holder.wait()
    compiler.compile(Guide.regex("b"))
    # Closing ends a compilation in progress.
    thread = threading.Thread(target=compile_slow)
    thread.start()
    time.sleep(0.3)
    compiler.close()
    thread.join(timeout=10)
    assert not thread.is_alive() and "again" in str(errors.pop())


@pytest.mark.parametrize("guide", FORMS, ids=["choice", "grammar"])
def test_masks_of_another_process_are_equal(compiler: GrammarCompiler, guide: Guide) -> None:
    here = GrammarCompiler(vocabulary()).compile(guide).begin()
    made = compiler.compile(guide)
    assert isinstance(made, RemoteGrammar)
    there, random = made.begin(), np.random.default_rng(1)
    output = np.zeros(0, np.int32)
    for _ in range(12):
        there.prepare(output)
        expected, mask = here.mask(output), there.mask(output)
        assert (expected is None) == (mask is None) and here.complete(output) == (mask is None)
        if expected is None or mask is None:
            break
        assert mask.bits == expected.bits and there.failure is None
        bits = np.unpackbits(np.frombuffer(mask.bits, np.uint8), bitorder="little")
        output = np.append(output, np.int32(random.choice(np.flatnonzero(bits))))
    # Rewind, as for a preempted sequence.
    assert (one := there.mask(output[:1])) is not None and (two := here.mask(output[:1]))
    assert one.bits == two.bits
    assert (one := there.mask(output[:0])) is not None and (two := here.mask(output[:0]))
    assert one.bits == two.bits
    there.close()


def test_the_number_of_guide_processes_is_limited(compiler: GrammarCompiler) -> None:
    made = compiler.compile(FORMS[0])
    first = made.begin().mask(np.zeros(0, np.int32))
    assert first is not None and first.only is not None
    output = np.array([first.only], np.int32)
    states = [made.begin() for _ in range(MAX_FOLLOWERS + 1)]
    for state in states:
        state.prepare(output)
    assert all(state.ready(output, timeout_s=30) for state in states[:-1])
    assert not states[-1].ready(output, timeout_s=0.1)
    states[0].close()
    assert states[-1].ready(output, timeout_s=30)
    # One whose process dies fails alone.
    assert compiler._checker is not None and compiler._checker._process is not None
    os.kill(workers(compiler._checker._process.pid)[0], signal.SIGKILL)
    mask = states[1].mask(output)
    assert mask is not None and mask.only is not None
    again = np.append(output, np.int32(mask.only))
    for state in states[1:]:
        state.mask(again)
    failures = [state.failure for state in states[1:]]
    assert sum("time or memory" in str(failure) for failure in failures) == 1, failures
    for state in states:
        state.close()


class LateMatcher:
    """A guide in this process whose masks arrive after a few requests."""

    def __init__(self, state: GuideState, delays: list[int]) -> None:
        self._state = state
        self._delays = delays
        self._output = np.zeros(0, np.int32)

    def request(self, output: np.ndarray) -> None:
        self._output = output.copy()
        self._delays.append(self._delays.pop(0))

    def ready(self, timeout_s: float = 0) -> bool:  # noqa: ARG002
        self._delays[0] -= self._delays[0] > 0
        return self._delays[0] == 0

    def read(self) -> tuple[bytes | None, str | None]:
        mask = self._state.mask(self._output)
        return None if mask is None else mask.bits, self._state.failure

    def close(self) -> None:
        pass


def late_engine(engine: Engine, delays: list[int], *, moves: bool = False) -> Engine:
    """The engine with remote guides: from the start, or after they move."""
    compiler = engine._grammars
    assert compiler is not None
    compile_here = compiler.compile
    followers = threading.Semaphore(2)

    class LateGrammar:
        def __init__(self, grammar: Grammar) -> None:
            self._grammar = grammar

        def begin(self) -> RemoteGuideState:
            first = self._grammar.begin().mask(np.zeros(0, np.int32))
            assert first is not None
            follow = lambda: LateMatcher(self._grammar.begin(), list(delays))  # noqa: E731
            return RemoteGuideState(follow, followers, first.bits)  # type: ignore[arg-type]

    def moving(guide: Guide) -> Grammar:
        made = compile_here(guide)
        assert isinstance(made, Grammar)
        made.move = LateGrammar(made).begin
        return made

    late = lambda guide: LateGrammar(compile_here(guide))  # noqa: E731
    compiler.compile = moving if moves else late  # type: ignore
    return engine


def test_a_guide_with_slow_masks_moves_to_another_process(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar may be fast in its tested beginning, and ambiguous later."""
    guide = Guide.regex("[ab]{3,9}")
    here = GrammarCompiler(vocabulary()).compile(guide).begin()
    made = compiler.compile(guide)
    moving, staying = made.begin(), made.begin()
    staying.stays_here = True
    monkeypatch.setattr(grammar, "MAX_LOCAL_MASK_S", -1.0)
    output, token = np.zeros(0, np.int32), 0
    for state in (moving, staying, here):
        mask = state.mask(output)
        assert mask is not None
        bits = np.unpackbits(np.frombuffer(mask.bits, np.uint8), bitorder="little")
        token = int(np.flatnonzero(bits)[0])
    assert (moving.is_remote, staying.is_remote, here.is_remote) == (True, False, False)
    output = np.array([token], np.int32)
    for state in (moving, staying, here):
        state.prepare(output)
        assert state.ready(output, timeout_s=30)
    masks = [state.mask(output) for state in (moving, staying, here)]
    assert None not in masks and len({mask.bits for mask in masks if mask is not None}) == 1
    assert moving.allows(output, token) and not moving.complete(output) and moving.failure is None
    moving.close()
    # One that cannot move fails in the end.
    for state in (moving, staying) * 4:
        state.mask(output)
    assert staying.failure == "its masks take too much time" and moving.failure is None


@examples(8)
@example(
    Language(({0: 1}, {0: 2}, {0: 3}, {0: 0}), frozenset({3})),
    SamplingParams(0.0), None, [1], True, True,
)  # fmt: skip
@given(
    languages(), samplings, st.sampled_from(SHAPES),
    st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans(), st.booleans(),
)  # fmt: skip
def test_outputs_with_late_masks_equal_masked_decoding(
    language: Language,
    sampling: SamplingParams,
    shape: DraftShape | None,
    delays: list[int],
    on_device: bool,
    moves: bool,
) -> None:
    guided = GenerateParams(max_new_tokens=14, sampling=sampling, guide=language.guide)
    plain = GenerateParams(max_new_tokens=14, sampling=SamplingParams(sampling.temperature, seed=3))
    each, known = [guided, plain, guided], [language, None, language]
    engine = knowing_letters(toy_cuda().engine) if on_device else guided_engine()
    with pytest.MonkeyPatch.context() as patch:
        # Each mask takes a tenth of a second too long: some move behind others.
        patch.setattr(grammar, "MAX_LOCAL_MASK_S", -0.1)
        # Guides that cannot move make up to three calls for each token.
        patch.setattr(grammar, "MAX_STAYING_EXCESS_S", 10.0)
        late = late_engine(engine, delays, moves=moves)
        ran = run(late, PROMPTS, each, speculation=shape)
    assert ran.ids == [decode_masked(*of) for of in zip(PROMPTS, each, known, strict=True)]
    for record, tokens in zip(ran.records, ran.events, strict=True):
        assert [event.token_id for event in tokens] == list(record.output_ids)
    for record in (ran.records[0], ran.records[2]):
        if record.finish_reason != "length":
            assert not language.allowed(record.output_ids)


def test_few_pages_change_nothing_for_late_masks() -> None:
    params = GenerateParams(
        max_new_tokens=30, sampling=SamplingParams(0.8, seed=4), guide=Guide.regex("[a-p]{40}")
    )
    whole = run(guided_engine(), PROMPTS, params, speculation=None)
    engine = guided_engine(ON_DEMAND, kv_pages=22)
    few = run(late_engine(engine, [1, 3]), PROMPTS, params, speculation=SHAPES[1])
    assert few.ids == whole.ids
    for record, tokens in zip(few.records, few.events, strict=True):
        assert [event.token_id for event in tokens] == list(record.output_ids)


def test_a_stuck_guide_with_late_masks_ends_its_own_request_only() -> None:
    # No token of the vocabulary is a space.
    stuck = GenerateParams(max_new_tokens=20, guide=Guide.regex("abc d"))
    plain = replace(stuck, guide=None)
    ran = run(late_engine(guided_engine(), [2]), PROMPTS[:2], [stuck, plain])
    assert ran.records[0].finish_reason == "guide_failed" and ran.ids[0][:3] == [0, 1, 2]
    assert ran.ids[1] == decode_masked(PROMPTS[1], plain, None)


def test_hostile_guides_are_compiled_or_rejected_with_a_reason(compiler: GrammarCompiler) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from fuzz.guides import hostile_guide

    kinds = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
    compiled = 0
    # The first two ended their process without a reply.
    for seed in (110, 136, *range(1, 9)):
        (name, value), _ = hostile_guide(Random(seed))
        try:
            compiler.compile(Guide.of({kinds[name]: value}, name=name))
            compiled += 1
        except RequestError as error:
            assert str(error).startswith(name) and "process was ended" not in str(error)
    assert compiled
