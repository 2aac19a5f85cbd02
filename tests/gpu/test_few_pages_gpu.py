"""Engines with few pages on the GPU, and page 0, which is never read: equal bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from example_engine import CHAIN, TREE, build_example, on_gpu, outputs, records

from specbuild.runtime.cache.layout import KvLayout
from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.decode import scheduler
from specbuild.runtime.decode.on_demand import PageChanges, _preempt, provide_pages
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.request import GenerateParams, Prompt, SequenceState
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import RuntimeSettings

# A sequence of 1024 tokens and its tree needs 17 pages of 64.
PAGES = 24
_NAN_PAIR = 0x7FC07FC0


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The example engine with pages for little more than one sequence of the maximum length."""
    directory: Path = tmp_path_factory.mktemp("few") / "engine"
    with on_gpu(build_example(directory, kv_pages=PAGES)) as engine:
        yield engine


@pytest.fixture(scope="module")
def on_demand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same engine with pages on demand."""
    directory = tmp_path_factory.mktemp("demand") / "engine"
    settings = RuntimeSettings(kv_policy="max-utilization")
    with on_gpu(build_example(directory, kv_pages=PAGES), settings) as engine:
        yield engine


def poison_page_0(engine: Engine) -> None:
    """Fill page 0 of every pool with NaN, after all queued work."""
    executor = engine.executor
    assert isinstance(executor, CudaExecutor)
    executor.use()
    for group in engine.manifest.cache_groups:
        layout = KvLayout(group)
        buffer = next(i for i, b in enumerate(executor.plan.buffers) if b.name == layout.name)
        for pool in layout.pools:
            nbytes = 2 * group.kv_heads * group.page_size * pool.shape[3]
            place = executor._memory.addresses[buffer] + pool.offset
            executor._gpu.fill(place, _NAN_PAIR, nbytes // 4, executor._stream)


def wanted(prompts: list[Prompt], tokens: int) -> list[GenerateParams]:
    """Return alternating greedy and sampled requests, each with its seed."""
    return [
        GenerateParams(
            max_new_tokens=tokens,
            sampling=SamplingParams(temperature=float(i % 2), seed=i),
            ignore_eos=True,
        )
        for i in range(len(prompts))
    ]


@pytest.mark.parametrize("shape", [None, CHAIN, TREE])
def test_few_pages_change_no_bit(
    engine: Engine, few: Engine, prompts: list[Prompt], shape: DraftShape | None
) -> None:
    params = wanted(prompts, 120)
    assert outputs(records(few, prompts, params, shape)) == outputs(
        records(engine, prompts, params, shape)
    )


@pytest.mark.parametrize("shape", [None, CHAIN, TREE])
def test_preemption_changes_no_bit_of_a_sequence(
    engine: Engine, on_demand: Engine, prompts: list[Prompt], shape: DraftShape | None
) -> None:
    params = wanted(prompts, 400)
    result = records(on_demand, prompts, params, shape)
    assert sum(record.stats.preemptions for record in result) > 0
    assert outputs(result) == outputs(records(engine, prompts, params, shape))


@pytest.mark.parametrize("shape", [None, CHAIN, TREE])
def test_ten_preemptions_change_no_bit(
    engine: Engine,
    on_demand: Engine,
    prompts: list[Prompt],
    shape: DraftShape | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Preempt at any point: during replay, or with steps in flight."""
    launches = iter(range(10**6))

    def preempting(
        running: list[SequenceState], kv: KvPools, *, max_step_tokens: int
    ) -> PageChanges:
        """Preempt the last admitted sequence at every fifth launch."""
        changes, youngest = provide_pages(running, kv, max_step_tokens=max_step_tokens), running[-1]
        told = (*changes.grown, *changes.paused, *changes.resumed)
        due = next(launches) % 5 == 0 and youngest.counters.preemptions < 10
        if due and len(running) > 1 and youngest not in told:
            _preempt(running.pop(), kv, changes)
        return changes

    few_prompts = prompts[:3]
    params = wanted(few_prompts, 250)
    clean = outputs(records(engine, few_prompts, params, shape))
    monkeypatch.setattr(scheduler, "provide_pages", preempting)
    result = records(on_demand, few_prompts, params, shape)
    assert max(record.stats.preemptions for record in result) >= 10
    assert outputs(result) == clean


@pytest.mark.parametrize("shape", [None, CHAIN, TREE])
def test_page_0_is_never_read(
    engine: Engine, prompts: list[Prompt], shape: DraftShape | None
) -> None:
    """Padding rows are written to it, but no sum includes it."""
    params = wanted(prompts, 60)
    clean = outputs(records(engine, prompts, params, shape))
    poison_page_0(engine)
    assert outputs(records(engine, prompts, params, shape)) == clean
