"""Prompts resume at snapshots of recurrent states, and no token changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_draft
from llama_checkpoints import HIDDEN, VOCAB, write_llama

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.cache_groups import slot_bytes
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings

TREE = DraftShape(4, 3, 12)


@pytest.fixture(scope="module")
def engine_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("snapshots")
    write_llama(folder / "model", "qwen3_5_text")
    write_draft(
        folder / "draft", target_layers=4, target_hidden=HIDDEN, target_vocab=VOCAB,
        hidden=HIDDEN, draft_vocab=24, aux_layers=(0,),
    )  # fmt: skip
    options = BuildOptions(
        model=folder / "model",
        draft=folder / "draft",
        output=folder / "engine",
        limits=LimitOptions(max_seq_len=384, max_batch_size=3),
        drafting=DraftOptions(top_k=4, depth=3, tokens=12),
    )
    build(options, SilentProgress())
    return options.output


def caching(
    directory: Path, *, snapshots: int = 8, interval: int = 128, rows: int | None = None
) -> Engine:
    """Return an engine with memory for this number of snapshots."""
    (group,) = Engine.load(directory).manifest.state_groups
    settings = RuntimeSettings(
        prefix_caching="on",
        state_snapshot_memory=snapshots * slot_bytes(group),
        state_snapshot_interval=interval,
        prefill=PrefillSchedule(rows),
    )
    return Engine.load(directory, settings)


def prompt_of(seed: int, length: int, *, shared: int = 0) -> tuple[int, ...]:
    """Return random tokens; the first ``shared`` ones are equal in every prompt."""
    common = np.random.default_rng(0).integers(2, VOCAB, shared)
    own = np.random.default_rng(seed).integers(2, VOCAB, length - shared)
    return (*common.tolist(), *own.tolist())


def records_of(
    engine: Engine, prompts: list[tuple[int, ...]], shape: DraftShape | None = TREE
) -> list[RunRecord]:
    requests = [Prompt(str(i), prompt_ids=ids) for i, ids in enumerate(prompts)]
    params = GenerateParams(max_new_tokens=24, ignore_eos=True)
    events = engine.generate(requests, params, speculation=shape)
    records = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    return [records[i] for i in range(len(prompts))]


def outputs(records: list[RunRecord]) -> list[tuple[int, ...]]:
    return [record.output_ids for record in records]


@pytest.mark.parametrize("shape", [None, TREE])
@pytest.mark.parametrize(("length", "cached"), [(65, 64), (129, 128), (200, 192), (300, 256)])
def test_a_prompt_resumes_at_its_last_snapshot(
    engine_directory: Path, length: int, cached: int, shape: DraftShape | None
) -> None:
    cold = Engine.load(engine_directory)
    engine = caching(engine_directory)
    first = prompt_of(1, length)
    longer = (*first, *prompt_of(2, 40))
    uncached = outputs([*records_of(cold, [first], shape), *records_of(cold, [longer], shape)])
    for prompt, expected, tokens in (
        (first, uncached[0], 0),
        (first, uncached[0], cached),
        (longer, uncached[1], cached),
    ):
        (record,) = records_of(engine, [prompt], shape)
        assert record.output_ids == expected
        assert record.stats.cached_tokens == tokens
    assert engine.prefixes is not None
    engine.prefixes.check_integrity()


def test_prompts_that_branch_resume_at_a_multiple_of_the_interval(engine_directory: Path) -> None:
    """They share 150 tokens, of which 128 precede a multiple of the interval."""
    engine, cold = caching(engine_directory), Engine.load(engine_directory)
    prompts = [prompt_of(seed, 250, shared=150) for seed in (1, 2, 3, 4)]
    expected = outputs(records_of(cold, prompts))
    records = records_of(engine, prompts[:1]) + records_of(engine, prompts[1:])
    assert outputs(records) == expected
    assert [record.stats.cached_tokens for record in records] == [0, 128, 128, 128]


def test_a_prompt_shorter_than_the_interval_is_not_cached(engine_directory: Path) -> None:
    engine = caching(engine_directory)
    for _ in range(2):
        (record,) = records_of(engine, [prompt_of(1, 64)])
        assert record.stats.cached_tokens == 0
    assert engine.prefixes is not None
    assert engine.prefixes.statistics.state_snapshots == 0


@pytest.mark.parametrize("rows", [None, 48])
def test_evicting_snapshots_changes_no_token(engine_directory: Path, rows: int | None) -> None:
    """Two snapshots fit into memory; launches have several prompts, and parts of one."""
    engine = caching(engine_directory, snapshots=2, interval=64, rows=rows)
    cold = Engine.load(engine_directory)
    random = np.random.default_rng(7)
    for turn in range(6):
        prompts = [
            prompt_of(turn % 3, int(random.integers(20, 280)), shared=int(shared))
            for shared in random.choice([0, 10, 19], 3)
        ]
        assert outputs(records_of(engine, prompts)) == outputs(records_of(cold, prompts))
        assert engine.prefixes is not None
        engine.prefixes.check_integrity()
    statistics = engine.prefixes.statistics
    assert statistics.hits > 0 and statistics.evicted_snapshots > 0
    assert statistics.state_snapshots - statistics.evicted_snapshots <= 2


def test_a_snapshot_is_evicted_with_its_pages(engine_directory: Path) -> None:
    engine = caching(engine_directory)
    records_of(engine, [prompt_of(1, 200)])
    cache = engine.prefixes
    assert cache is not None and cache.snapshots is not None
    assert cache.snapshots.pool.cached_pages == 2
    full = engine._kv.pools["full"]
    for page in sorted(cache._tree.cached_pages(0).tolist(), key=lambda p: -p):
        full.discard(page)
    assert cache.snapshots.pool.cached_pages == 0
    cache.check_integrity()
    (record,) = records_of(engine, [prompt_of(1, 200)])
    assert record.stats.cached_tokens == 0
