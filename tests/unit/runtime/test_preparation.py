"""Programs are loaded before requests need them, and first uses are never taken as step times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from fake_gpu import FakeKernel
from serve.served import served
from toy_device import ToyCuda, toy_cuda
from toy_engine import prompt, run, toy_engine
from toy_model import decode_plainly
from toy_plan import BATCHES, SHAPES

from specbuild.runtime.decode import session as session_module
from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.device import flights, stepper
from specbuild.runtime.draft.policy import MeasuredPolicy, SequenceDepths, StepOutcome
from specbuild.runtime.engine_dir.drafters.suffix import SuffixRecord
from specbuild.runtime.engine_dir.generation_defaults import GenerationDefaults
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.request import FinishEvent, GenerateParams
from specbuild.runtime.sampling import SamplingParams

GREEDY = GenerateParams(max_new_tokens=40, ignore_eos=True)
RECORD = SuffixRecord(cache_max_depth=6, max_tokens=6, min_token_prob=0.0, cached_tokens=100)
LIMITS = DraftShape(3, 6, 12)
TOP_K = replace(GREEDY, sampling=SamplingParams(temperature=1.0, seed=3, top_k=4))
ALL_OF_ONE = {f"step@1.{k}" for k in ("0-0-0.{}", "0-0-0.{}.extends")} | {
    f"step@1.{s.draft_top_k}-{s.draft_depth}-{s.draft_tokens}.{{}}" for s in SHAPES
}


def steps_of_one(*, full_logits: bool = False) -> set[str]:
    """Return the steps that a single sequence may need."""
    return {name.format(int(full_logits)) for name in ALL_OF_ONE}


def loaded(toy: ToyCuda) -> list[str]:
    """Return the programs whose kernels were loaded, in order."""
    entries = [line for line in toy.device.gpu.log if line.startswith("load ")]
    return [line.removeprefix("load ").removesuffix(".cubin") for line in entries]


def wait_until(condition: Callable[[], Any]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def prepared(toy: ToyCuda, setting: DraftSetting, params: GenerateParams) -> list[str]:
    """Load all likely programs, and return them in order."""
    toy.engine.session.prepare(setting, params)
    wait_until(lambda: toy.engine.session._preparation is None)
    return loaded(toy)


@pytest.mark.parametrize("params", [GREEDY, TOP_K], ids=["greedy", "top-k"])
def test_the_first_requests_load_no_program(params: GenerateParams) -> None:
    toy = toy_cuda()
    before = prepared(toy, DraftSetting(), params)
    assert len(before) == len(set(before))
    for ids in ([[1, 2]], [[1, 2], [3], [4, 5, 6], [2] * 9]):
        outputs = run(toy.engine, ids, params).ids
        # The end of sequence is ignored, so a plain decode is a prefix.
        for given, prompt_ids in zip(outputs, ids, strict=True):
            plain = decode_plainly(prompt_ids, 40, params.sampling)
            assert given[: len(plain)] == plain
    assert len({*toy.device.started}) > len(BATCHES)
    assert loaded(toy) == before


def test_the_steps_of_one_sequence_come_first_then_prefill_then_batches() -> None:
    toy = toy_cuda()
    preparation = toy.engine.decoder.preparation(DraftSetting(), GREEDY)
    next(preparation)
    assert set(loaded(toy)) == steps_of_one()
    for number, _ in enumerate(preparation, start=len(steps_of_one()) + 1):
        assert len(loaded(toy)) == number
    rest = loaded(toy)[len(steps_of_one()) :]
    assert rest[:2] == ["prefill@4", "prefill@8"]
    batches = [int(name.split("@")[1].split(".")[0]) for name in rest[2:]]
    assert batches == sorted(batches)
    assert {*batches} == {2, 4}
    assert not any(name.endswith((".1", ".1.extends", ".logits")) for name in rest)
    # Steps with parts of chains exist for batches of two and more.
    assert any(".rows-" in name for name in rest)


def test_default_penalties_need_no_program_that_is_not_loaded() -> None:
    toy = toy_cuda()
    params = replace(GREEDY, sampling=SamplingParams(repetition_penalty=1.2))
    preparation = toy.engine.decoder.preparation(DraftSetting(), params)
    next(preparation)
    assert set(loaded(toy)) == {*steps_of_one(full_logits=True), "adjust"}
    before = prepared(toy, DraftSetting(), params)
    assert before.count("adjust") == 1
    for ids in ([[1, 2]], [[1, 2], [3], [4, 5, 6]]):
        run(toy.engine, ids, params)
    assert "adjust" in toy.device.started
    assert loaded(toy) == before


@pytest.mark.parametrize("shape", [None, SHAPES[1], SHAPES[2]])
def test_only_the_programs_of_the_setting_are_loaded(shape: Any) -> None:
    toy = toy_cuda()
    programs = prepared(toy, DraftSetting(shape), GREEDY)
    steps = [name for name in programs if name.startswith("step")]
    s = (0, 0, 0) if shape is None else (shape.draft_top_k, shape.draft_depth, shape.draft_tokens)
    assert steps == [f"step@{batch}.{s[0]}-{s[1]}-{s[2]}.0" for batch in BATCHES]
    run(toy.engine, [[1, 2], [3]], GREEDY, speculation=shape)
    assert loaded(toy) == programs


def test_steps_for_host_chains_are_loaded_with_a_host_drafter() -> None:
    toy = toy_cuda(suffix=RECORD, limits=LIMITS)
    preparation = toy.engine.decoder.preparation(DraftSetting(), GREEDY)
    next(preparation)
    chains = {name for name in loaded(toy) if ".offered-" in name}
    assert chains and all(name.startswith("step@1.") for name in chains)


def test_an_engine_on_the_host_loads_nothing() -> None:
    engine = toy_engine()
    engine.session.prepare(DraftSetting(), GREEDY)
    assert engine.session._thread is None
    assert list(engine.decoder.preparation(DraftSetting(), GREEDY)) == []


def test_a_server_that_answers_has_the_steps_of_one_sequence() -> None:
    toy = toy_cuda()
    with served(toy.engine) as (url, app):
        assert httpx.get(f"{url}/health").status_code == 200
        assert steps_of_one() <= set(loaded(toy))
        assert app.service.failure is None


def test_a_server_loads_the_programs_of_its_default_sampling() -> None:
    """Its temperature is 1 if the checkpoint recommends none, and then top-k needs full logits."""
    toy = toy_cuda()
    toy.engine.generation_defaults = GenerationDefaults(top_k=4)
    with served(toy.engine):
        wait_until(lambda: toy.engine.session._preparation is None)
        assert {name for name in loaded(toy) if "@1." in name} == steps_of_one(full_logits=True)


def before_loads(toy: ToyCuda, act: Callable[[str], None]) -> None:
    """Call a function with the name of each program that is loaded from now on, before it is."""
    gpu: Any = toy.device.gpu
    load = gpu.load_module

    def load_module(cubin: bytes, where: str) -> bytes:
        act(where.removesuffix(".cubin"))
        return load(cubin, where)

    gpu.load_module = load_module


def test_a_request_waits_for_one_program_at_most() -> None:
    toy = toy_cuda()
    session, is_reached = toy.engine.session, threading.Event()
    at_end = list[list[str]]()

    def wait_for_the_request(name: str) -> None:
        if name == "prefill@4":
            is_reached.set()
            wait_until(lambda: session._inbox)

    before_loads(toy, wait_for_the_request)
    session.prepare(DraftSetting(), GREEDY)
    assert is_reached.wait(60)

    def deliver(batch: Any) -> None:
        if any(isinstance(event, FinishEvent) for event in batch):
            at_end.append(loaded(toy))

    session.add(toy.engine.check_prompts([prompt([1, 2])], GREEDY), DraftSetting(), deliver)
    wait_until(lambda: session._preparation is None)
    assert at_end == [loaded(toy)[: len(steps_of_one()) + 1]]
    assert len(loaded(toy)) > len(at_end[0])


def test_the_rest_is_left_out_when_the_engine_closes() -> None:
    toy = toy_cuda()
    session, is_reached = toy.engine.session, threading.Event()

    def wait_for_the_end(name: str) -> None:
        if name == "prefill@4":
            is_reached.set()
            wait_until(lambda: session._inbox)
        elif is_reached.is_set():
            wait_until(lambda: session._preparation is None)

    before_loads(toy, wait_for_the_end)
    session.prepare(DraftSetting(), GREEDY)
    assert is_reached.wait(60)
    toy.engine.close()
    assert toy.device.gpu.closed
    assert len(loaded(toy)) <= len(steps_of_one()) + 2


def test_the_rest_is_left_out_when_all_requests_are_aborted() -> None:
    """The caller may let the process end without closing the engine, as Dynamo's worker does."""
    toy = toy_cuda()
    session, is_reached = toy.engine.session, threading.Event()

    def wait_for_the_abort(name: str) -> None:
        if name == "prefill@4":
            is_reached.set()
            wait_until(lambda: session._inbox)

    before_loads(toy, wait_for_the_abort)
    session.prepare(DraftSetting(), GREEDY)
    assert is_reached.wait(60)
    session.abort().wait(60)
    wait_until(lambda: session._thread is None)
    assert loaded(toy)[-1] == "prefill@4"


@pytest.mark.parametrize("name", ["step@1.1-3-3.0", "step@2.0-0-0.0"])
def test_a_damaged_program_fails_only_the_requests_that_need_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = toy_cuda()
    assert isinstance(toy.engine.executor, CudaExecutor)
    runner = toy.engine.executor.runner
    read = runner._read_file
    runner._read_file = lambda file: b"{" if file == f"{name}.json" else read(file)
    warnings: list[str] = []
    monkeypatch.setattr(session_module._LOG, "warning", lambda *w: warnings.append(w[0] % w[1:]))
    prepared(toy, DraftSetting(), GREEDY)
    (warning,) = warnings
    assert f"before its first use: {name}.json is no program" in warning
    plain = decode_plainly([1, 2], 40, GREEDY.sampling)
    assert run(toy.engine, [[1, 2]], GREEDY, speculation=SHAPES[0]).ids[0][: len(plain)] == plain
    needs = {"speculation": SHAPES[1]} if "1-3-3" in name else {"speculation": None}
    with pytest.raises(SpecbuildError, match="is no program"):
        run(toy.engine, [[1, 2], [3]][: 1 + ("@2" in name)], GREEDY, **needs)


@dataclass
class SimulatedClock:
    """The times of a host and of a GPU whose programs are slower at their first use.

    A recording takes the host ``recording_s``. The first run of a program takes the GPU
    ``first_run_s`` more than a step of ``step_s``.
    """

    toy: ToyCuda
    recording_s: float
    first_run_s: float
    host_s: float = 0.0
    gpu_s: float = 0.0
    _submitted_s: float = 0.0
    _event_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        gpu: Any = self.toy.device.gpu
        end_capture, launch, record, wait = (
            gpu.end_capture, gpu.launch_graph, gpu.record, gpu.wait,
        )  # fmt: skip
        ran: set[str] = set()

        def timed(name: str, kernel: FakeKernel) -> FakeKernel:
            def run_kernel(*arguments: int) -> None:
                kernel.run(*arguments)
                duration_s = self.step_s(name) + self.first_run_s * (name not in ran)
                ran.add(name)
                self.gpu_s = max(self.gpu_s, self._submitted_s) + duration_s

            return FakeKernel(run_kernel, kernel.kinds)

        def slow_end_capture(stream: Any) -> Any:
            self.host_s += self.recording_s
            return end_capture(stream)

        def timed_launch(graph: Any, stream: Any) -> None:
            self.host_s += 20e-6
            gpu.enqueue(stream, lambda at=self.host_s: setattr(self, "_submitted_s", at))
            launch(graph, stream)

        def timed_record(event: Any, stream: Any) -> None:
            gpu.enqueue(stream, lambda: self._event_s.update({id(event): self.gpu_s}))
            record(event, stream)

        def timed_wait(event: Any) -> None:
            wait(event)
            self.host_s = max(self.host_s, self._event_s.get(id(event), 0.0))

        gpu.kernels = {name: timed(name, kernel) for name, kernel in gpu.kernels.items()}
        gpu.end_capture, gpu.launch_graph = slow_end_capture, timed_launch
        gpu.record, gpu.wait = timed_record, timed_wait

    @staticmethod
    def step_s(name: str) -> float:
        """Return the seconds of a program after its first run: by its number of draft tokens."""
        if not name.startswith("step"):
            return 10e-3
        return 1.2e-3 + 0.3e-3 * int(name.split(".")[1].split("-")[2])

    def step_of(self, outcome: StepOutcome) -> float:
        """Return the seconds of the step that had this outcome."""
        chosen = outcome.shape
        shape = chosen.shape if isinstance(chosen, SequenceDepths) else chosen
        return self.step_s(f"step@1.0-0-{getattr(shape, 'draft_tokens', 0)}")


@pytest.mark.parametrize("recording_s", [0.5e-3, 40e-3])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_the_time_of_a_first_use_is_never_the_time_of_a_step(
    recording_s: float, is_prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program's first use includes its recording by the host, and a slower run of the GPU."""
    toy = toy_cuda()
    clock = SimulatedClock(toy, recording_s, first_run_s=3e-3)
    for module in (flights, stepper):
        monkeypatch.setattr(module, "perf_counter", lambda: clock.host_s)
    outcomes: list[StepOutcome] = []
    observe = MeasuredPolicy.observe

    def observed(policy: MeasuredPolicy, outcome: StepOutcome) -> None:
        outcomes.append(outcome)
        observe(policy, outcome)

    monkeypatch.setattr(MeasuredPolicy, "observe", observed)
    if is_prepared:
        prepared(toy, DraftSetting(), GREEDY)
    for ids in ([[1, 2]], [[3], [4, 5]], [[6]], [[1], [2], [3], [4]]):
        run(toy.engine, ids, GREEDY)
    timed = [outcome for outcome in outcomes if outcome.step_s is not None]
    assert len({outcome.shape for outcome in timed}) > 2
    assert len(timed) > 0.5 * len(outcomes)
    for outcome in timed:
        assert outcome.step_s == pytest.approx(clock.step_of(outcome), rel=0.02)
