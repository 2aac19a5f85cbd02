"""The prefix cache with real plans: windows, drafts, views. The interpreter runs the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_draft, write_target
from dflash_drafts import write_dflash
from drafted_programs import watched
from indexer_files import write_indexers
from latent_files import write_latents
from plan_host import lowered_engine
from test_cuda_interpreted import engine_of as engine_of_programs
from test_cuda_latent_views import SIZES
from test_cuda_selections import CHAIN, VIEWED, device, options
from test_cuda_views import NEAR, SHAPES, checkpoints, engine_of, with_views
from toy_engine import CACHING, run

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import GenerateParams

__all__ = ["checkpoints", "with_views"]

TOKENS, PAGE = 10, 16


def prompt(length: int, vocab: int) -> list[int]:
    return np.random.default_rng(5).integers(3, vocab, length).tolist()


def pair(
    engine: Engine, ids: list[int], shape: DraftShape | None, **params: Any
) -> tuple[RunRecord, RunRecord]:
    """Run the same prompt twice: with an empty cache, and with the pages of the first run."""
    engine = Engine(engine.manifest, engine.executor, CACHING)
    asked = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True, **params)
    cold, hit = (run(engine, [ids], asked, speculation=shape).records[0] for _ in range(2))
    assert engine.prefixes is not None
    engine.prefixes.check_integrity()
    assert cold.stats.cached_tokens == 0
    assert hit.stats.cached_tokens == (len(ids) - 1) // PAGE * PAGE
    return cold, hit


def assert_alike(cold: RunRecord, hit: RunRecord) -> None:
    """The references round differently with the number of rows, unlike the kernels."""
    pairs = zip(cold.output_ids, hit.output_ids, strict=True)
    parted = next((i for i, (a, b) in enumerate(pairs) if a != b), TOKENS)
    assert parted >= TOKENS // 2
    assert cold.logprobs is not None and hit.logprobs is not None
    np.testing.assert_allclose(cold.logprobs[:parted], hit.logprobs[:parted], atol=NEAR)


@pytest.mark.parametrize("shape", SHAPES, ids=["none", "chain", "tree"])
def test_a_hit_is_a_cold_run(with_views: LoweredEngine, shape: DraftShape | None) -> None:
    """The prompt is longer than its window, and the draft has ingested it."""
    engine, runner, _ = engine_of(with_views)
    cold, hit = pair(engine, prompt(90, 250), shape, specpv_retrieval_blocks=0)
    assert_alike(cold, hit)
    prefills = [name for name in runner.started if name.startswith("prefill")]
    assert prefills == ["prefill@256", "prefill@64"], "of 90 rows the second time reads ten"
    if shape is not None:
        assert cold.stats.acceptance_histogram == hit.stats.acceptance_histogram


def test_views_may_contain_shared_pages(with_views: LoweredEngine) -> None:
    engine, *_ = engine_of(with_views)
    cold, hit = pair(engine, prompt(100, 250), SHAPES[1], specpv_retrieval_blocks=1)
    for record in (cold, hit):
        stats = record.stats.specpv
        assert stats is not None and stats.partial_steps > 2 and not stats.invariant_failures
    assert_alike(cold, hit)


def test_a_block_draft_reads_a_shared_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a hit the last block's logits are those of a cold run."""
    write_target(tmp_path / "target", layers=4, head_dim=32)
    write_dflash(tmp_path / "draft", dtype=torch.bfloat16)
    lowered = lowered_engine(
        tmp_path / "target", tmp_path / "draft", max_seq_len=128, max_batch_size=1, page_size=PAGE,
        draft_top_k=1, draft_depth=2, draft_tokens=2,
    )  # fmt: skip
    engine, _ = engine_of_programs(lowered)
    engine = Engine(engine.manifest, engine.executor, CACHING)
    drafted, logits = watched(monkeypatch), []
    asked = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    for cached in (0, 64):
        (record,) = run(engine, [prompt(70, 250)], asked, speculation=DraftShape(1, 2, 2)).records
        assert record.stats.cached_tokens == cached
        logits.append(drafted.logits)
    torch.testing.assert_close(*logits, atol=NEAR, rtol=NEAR)


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> LoweredEngine:
    """Layers with a window cache no latents; indexers select the views."""
    path = tmp_path_factory.mktemp("latents")
    write_target(path / "t")
    write_indexers(path / "t", [1, 3], width=16)
    write_latents(path / "t", {0: 12, 1: 20, 2: 12, 3: 12})
    write_draft(path / "d")
    return lowered_engine(**options(path, **VIEWED, **SIZES))


@pytest.mark.parametrize("viewed", [False, True], ids=["sparse", "viewed"])
def test_latents_and_indexers_follow_the_full_pages(latents: LoweredEngine, viewed: bool) -> None:
    """Rows select tokens, or views select blocks, by keys that another prompt wrote."""
    found = device(latents, specpv=True)
    params = {"dsa_top_k": 0} if viewed else {}
    params["specpv_retrieval_blocks"] = int(viewed)
    cold, hit = pair(found.engine, prompt(85, 250), CHAIN, **params)
    assert_alike(cold, hit)
    assert viewed or any(found.steps)
