"""Engines with few pages on the GPU, and a page 0 that nobody reads: bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from example_engine import CHAIN, TREE, build_example, on_gpu, outputs, records

from specbuild.runtime.cache.layout import KvLayout
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

# A sequence of 1024 tokens and its tree takes 17 pages of 64.
PAGES = 24
_NAN_PAIR = 0x7FC07FC0


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The example engine with pages for little more than one sequence of the longest length."""
    directory: Path = tmp_path_factory.mktemp("few") / "engine"
    with on_gpu(build_example(directory, kv_pages=PAGES)) as engine:
        yield engine


def poison_page_0(engine: Engine) -> None:
    """NaN in page 0 of every pool, behind all that is queued."""
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
    """Greedy and sampled in turn, each with its seed."""
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
def test_nobody_reads_page_0(
    engine: Engine, prompts: list[Prompt], shape: DraftShape | None
) -> None:
    """Padding writes there; what it holds is in no sum."""
    params = wanted(prompts, 60)
    clean = outputs(records(engine, prompts, params, shape))
    poison_page_0(engine)
    assert outputs(records(engine, prompts, params, shape)) == clean
