"""The example as a CUDA engine on a GPU: lossless, batch-invariant, close to the CPU engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import pytest
from example_engine import CHAIN, EXAMPLE, TREE, records

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.device.decoder import DeviceDecoder
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.executors.cuda.loading import open_executor
from specbuild.runtime.executors.cuda.memory import RESERVE_BYTES, footprint
from specbuild.runtime.measure.benchmark_batch import benchmark_batch
from specbuild.runtime.measure.graph_timing import profile_program, time_program
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings

TOKENS = 64
FORCED_TOKENS = 256
# bf16 may exchange two logits that are closer than this: seven times the root mean square error of
# a logit after 24 layers.
NEAR_TIE = 0.3


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    output = tmp_path_factory.mktemp("example") / "cpu"
    build(
        BuildOptions(
            model=EXAMPLE / "target", output=output, limits=LimitOptions(max_seq_len=1024)
        ),
        SilentProgress(),
    )
    return Engine.load(output)


def params(temperature: float = 0.0, count: int = TOKENS) -> GenerateParams:
    sampling = SamplingParams(temperature=temperature, seed=11)
    return GenerateParams(max_new_tokens=count, sampling=sampling, ignore_eos=True)


def last_features(engine: Engine, prompts: list[Prompt], shape: DraftShape | None) -> np.ndarray:
    """Return the bits of the target's features of the first request's last committed tokens.

    Its last step left them for the draft. The first request runs longest, so no other request uses
    its row.
    """
    executor = engine.executor
    assert isinstance(executor, CudaExecutor)
    port = executor.port("pending_captured")
    assert port is not None
    nobodys = 0x7FC0  # NaN as bf16
    executor.write("pending_captured", np.full(port.shape, nobodys, np.uint16))
    counts = [TOKENS, *[20 + 3 * i for i in range(len(prompts) - 1)]]
    list(engine.generate(prompts, [params(count=n) for n in counts], speculation=shape))
    rows = executor.read("pending_captured", rows=1)[0]
    return rows[(rows != nobodys).any(axis=1)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_draft_changes_no_token_and_no_bit_of_a_logprob(
    engine: Engine, prompts: list[Prompt], shape: DraftShape, temperature: float
) -> None:
    plain = records(engine, prompts, params(temperature), None)
    drafted = records(engine, prompts, params(temperature), shape)
    for a, b in zip(plain, drafted, strict=True):
        assert a.output_ids == b.output_ids
        assert a.logprobs == b.logprobs
    accepted = sum(sum(r.stats.acceptance_histogram[1:]) for r in drafted)
    assert accepted > len(prompts)


def test_a_sequence_is_equal_alone_and_in_a_batch(engine: Engine, prompts: list[Prompt]) -> None:
    few = prompts[:8]
    together = records(engine, few, params(), CHAIN)
    alone = [records(engine, [prompt], params(), None)[0] for prompt in few]
    for a, b in zip(together, alone, strict=True):
        assert a.output_ids == b.output_ids
        assert a.logprobs == b.logprobs


def test_waiting_for_a_step_uses_no_processor_time(engine: Engine, prompts: list[Prompt]) -> None:
    """While a later launch is queued, the engine's thread sleeps.

    Polling would use all of the time.
    """
    records(engine, prompts[:1], params(), None)
    started_s, used_s = perf_counter(), process_time()
    records(engine, prompts[:1], params(count=FORCED_TOKENS), None)
    share = (process_time() - used_s) / (perf_counter() - started_s)
    assert share < 0.9


@pytest.mark.parametrize("rows", [None, 16])
@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["none", "chain", "tree"])
def test_a_sequence_that_joins_a_batch_has_equal_tokens(
    engine: Engine,
    prompts: list[Prompt],
    shape: DraftShape | None,
    rows: int | None,
) -> None:
    few = prompts[:6]
    alone = [records(engine, [prompt], params(), None)[0] for prompt in few]
    settings = RuntimeSettings(prefill=PrefillSchedule(rows))
    engine = Engine(engine.manifest, engine.executor, settings, text=engine.text)
    streams = []
    for prompt in few:
        requests = engine.check_prompts([prompt], params())
        streams.append(engine.session.add(requests, DraftSetting(shape)))
        next(streams[-1])
    for stream, expected in zip(streams, alone, strict=True):
        (end,) = [event for event in stream if isinstance(event, FinishEvent)]
        assert end.record.output_ids == expected.output_ids
        assert end.record.logprobs == expected.logprobs


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["none", "chain", "tree"])
def test_hidden_states_have_equal_bits_alone_and_in_a_batch(
    engine: Engine, prompts: list[Prompt], shape: DraftShape | None, batch: int
) -> None:
    alone = last_features(engine, prompts[:1], None)
    rows = last_features(engine, prompts[:batch], shape)
    assert len(alone) > 1
    assert len(rows) >= 1
    # The last path may extend beyond the last requested token, by at most the draft's depth.
    deepest = 0 if shape is None else min(shape.draft_depth, len(rows) - 1)
    assert any(_same_tail(rows[: len(rows) - past], alone) for past in range(deepest + 1))


def _same_tail(rows: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether the last rows have equal bits."""
    both = min(len(rows), len(expected))
    return np.array_equal(rows[-both:], expected[-both:])


def test_greedy_tokens_equal_the_cpu_engine_under_teacher_forcing(
    engine: Engine, cpu: Engine, prompts: list[Prompt]
) -> None:
    """In transformers, a bf16 forward selects 99.7 % of these tokens like fp32."""
    decoder = engine.decoder
    assert isinstance(decoder, DeviceDecoder)
    lost: list[float] = []
    for record in records(cpu, prompts, params(count=FORCED_TOKENS), None):
        ids = (*record.prompt_ids, *record.output_ids)
        logits = np.concatenate([scored.logits for scored in decoder.score(ids[:-1])])
        rows = logits[len(record.prompt_ids) - 1 :]
        tokens = np.array(record.output_ids)
        assert len(rows) == len(tokens) == FORCED_TOKENS
        lost += (rows.max(axis=1) - rows[np.arange(len(rows)), tokens]).tolist()
    print(f"{sum(x > 0 for x in lost)} of {len(lost)} differ, by {max(lost):.3f} at most")
    assert sum(x == 0 for x in lost) / len(lost) >= 0.99
    assert max(lost) < NEAR_TIE


def test_launching_kernels_singly_equals_the_graph(
    directory: Path, engine: Engine, prompts: list[Prompt]
) -> None:
    """Without graphs, most launches do not overlap: a race would change a token."""
    executor = open_executor(directory, engine.manifest, readers=4, recorded=False)
    plain = Engine(engine.manifest, executor, text=engine.text)
    try:
        few, short = prompts[:3], params(count=24)
        slow, fast = (records(e, few, short, CHAIN) for e in (plain, engine))
        for a, b in zip(slow, fast, strict=True):
            assert a.output_ids == b.output_ids
            assert a.logprobs == b.logprobs
    finally:
        executor.close()


def test_stop_strings_and_ends_of_sequence(engine: Engine, prompts: list[Prompt]) -> None:
    full = records(engine, prompts[:4], params(), CHAIN)
    for prompt, whole in zip(prompts[:4], full, strict=True):
        assert whole.text
        stop = whole.text[len(whole.text) // 2 :][:4]
        expected = replace(params(), stop=(stop,))
        (cut,) = records(engine, [prompt], expected, CHAIN)
        assert cut.finish_reason == "stop"
        assert cut.text == whole.text[: whole.text.index(stop)]


def test_memory_equals_the_prediction(directory: Path, engine: Engine) -> None:
    executor = open_executor(directory, engine.manifest, readers=4)
    gpu = executor.runner.gpu
    try:
        again = Engine(engine.manifest, executor, text=engine.text)
        predicted = footprint(executor.plan).total
        before = gpu.free_bytes()
        records(again, [Prompt("a", (1, 2, 3))], params(count=8), CHAIN)
        used = before - gpu.free_bytes()
        assert predicted > 0
        assert used < RESERVE_BYTES
    finally:
        executor.close()


@pytest.mark.speed
@pytest.mark.parametrize("shape", [None, CHAIN], ids=["none", "chain"])
def test_measures_the_time_of_a_step(engine: Engine, shape: DraftShape | None) -> None:
    with benchmark_batch(engine, batch=2, context=200, shape=shape) as placed:
        runner = placed.executor.runner
        entry = ProgramTable(placed.executor.plan).step(shape, batch=2, full_logits=False)
        step_s = time_program(runner, entry, 5, reset=placed.reset)
        launches = profile_program(runner, entry, 5, reset=placed.reset)
    assert 1e-6 < step_s < 1
    assert sum(launch.added_s for launch in launches) == pytest.approx(step_s, rel=0.5)
