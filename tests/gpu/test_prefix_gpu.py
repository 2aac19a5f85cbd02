"""The prefix cache on a GPU: a prompt with cached pages has the bits of a cold run."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from example_engine import (
    CHAIN,
    EXAMPLE,
    TREE,
    build_example,
    linked_target,
    on_gpu,
    outputs,
    records,
)
from indexer_files import write_derived_indexers

from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.retrofit.config import LatentOptions
from specbuild.builder.training.retrofit.mla import retrofit_mla
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import KvPolicy, RuntimeSettings

TOKENS, LENGTH = 40, 700
# The views have all blocks, so the time of full steps changes no bit.
VIEWS: dict[str, Any] = {
    "page_size": 16,
    "specpv": True,
    "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 64,
    "specpv_n_window_blocks": 2,
    "specpv_n_spec_tokens_buf": 32,
    "specpv_partial_threshold": 64,
    "specpv_full_refresh_interval": 6,
}
# Rows select all tokens, which has the bits of full attention.
CHOICES: dict[str, Any] = {
    "dsa": True,
    "dsa_top_k": 1024,
    "dsa_threshold": 256,
    "dsa_recent_tokens": 16,
    "dsa_check_interval": 0,
}
# A sequence of 1024 tokens and its tree needs 17 pages of 64.
FEW_PAGES = 24


@dataclass
class Pair:
    """One engine directory loaded twice: without a cache, and with one."""

    cold: Engine
    caching: Engine

    @property
    def page_size(self) -> int:
        return self.cold.manifest.cache_groups[0].page_size


@pytest.fixture(scope="module", params=["keys and values", "codes", "latents", "views", "indexers"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("prefix")
    changes = dict(VIEWS) if request.param == "views" else {}
    if request.param == "codes":
        changes["kv_dtype"] = "fp8"
    if request.param == "latents":
        changes["model"] = folder / "target"
        copytree(EXAMPLE / "target", folder / "target")
        retrofit_mla(LatentOptions(model=folder / "target", rank=64), SilentProgress())
    if request.param == "indexers":
        changes = {"model": linked_target(folder), **CHOICES}
        weights = EXAMPLE / "target" / "model.safetensors"
        write_derived_indexers(folder / "target", weights, range(1, 24, 2), width=64)
    with ExitStack() as opened:
        yield opened_pair(opened, build_example(folder / "cuda", **changes))


def opened_pair(
    opened: ExitStack, directory: Path, policy: KvPolicy = "guaranteed-no-evict"
) -> Pair:
    settings = RuntimeSettings(prefix_caching="on", kv_policy=policy)
    cold = opened.enter_context(on_gpu(directory))
    return Pair(cold, opened.enter_context(on_gpu(directory, settings)))


def text_ids(engine: Engine) -> tuple[int, ...]:
    assert engine.text is not None
    return tuple(engine.text.encode(inspect.getsource(textwrap), raw=True, most_tokens=1 << 15))


def params(index: int, tokens: int = TOKENS) -> GenerateParams:
    """Return parameters of which every second one uses sampling."""
    sampling = SamplingParams(temperature=float(index % 2), seed=index)
    return GenerateParams(max_new_tokens=tokens, sampling=sampling, ignore_eos=True)


def cached(result: list[RunRecord]) -> list[int]:
    return [record.stats.cached_tokens for record in result]


def checked(engine: Engine) -> None:
    assert engine.prefixes is not None
    engine.prefixes.check_integrity()


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["none", "chain", "tree"])
@pytest.mark.parametrize("index", [0, 1], ids=["greedy", "sampled"])
def test_a_hit_has_the_bits_of_a_cold_run(pair: Pair, shape: DraftShape | None, index: int) -> None:
    """Compare tokens, log-probabilities and accepted drafts; another salt has no hits."""
    first = {None: 0, CHAIN: 100, TREE: 200}[shape] + 50 * index
    ids = text_ids(pair.cold)[first : first + LENGTH]
    params_of_requests = replace(params(index), cache_salt=f"{shape} {index}")
    prompts = [Prompt("a", ids)]
    (cold,) = records(pair.cold, prompts, params_of_requests, shape)
    result = [records(pair.caching, prompts, params_of_requests, shape)[0] for _ in range(3)]
    salted = records(pair.caching, prompts, replace(params_of_requests, cache_salt="other"), shape)
    whole = (LENGTH - 1) // pair.page_size * pair.page_size
    assert cached([cold, *result]) == [0, 0, whole, whole]
    assert outputs([*result, *salted]) == outputs([cold] * 4)
    assert {r.stats.acceptance_histogram for r in result} == {cold.stats.acceptance_histogram}
    checked(pair.caching)


@pytest.mark.parametrize("shape", [None, CHAIN], ids=["none", "chain"])
def test_concurrent_prompts_with_a_shared_prefix(pair: Pair, shape: DraftShape | None) -> None:
    """Eight prompts with a shared prefix, in three rounds: each equals a cold run alone."""
    ids = text_ids(pair.cold)
    prompts = [
        Prompt(str(i), ids[: 90 * i + 30] + ids[1000 + 97 * i : 1100 + 110 * i]) for i in range(8)
    ]
    params_of_requests = [params(i) for i in range(8)]
    cold = [
        outputs(records(pair.cold, [p], [a], shape))[0]
        for p, a in zip(prompts, params_of_requests, strict=True)
    ]
    for round_ in range(3):
        result = records(pair.caching, prompts, params_of_requests, shape)
        assert outputs(result) == cold, round_
        assert sum(cached(result)) > 1000
        checked(pair.caching)


def test_a_chat_of_several_turns(pair: Pair) -> None:
    """Each prompt contains the previous answer, whose pages are reused like a prompt's."""
    ids, chat = text_ids(pair.cold), ()
    for turn in range(6):
        chat += ids[100 * turn : 100 * turn + 90]
        prompts, requests = [Prompt("a", chat)], params(turn)
        cold, result = (records(e, prompts, requests, CHAIN) for e in (pair.cold, pair.caching))
        assert outputs(result) == outputs(cold)
        chat += result[0].output_ids
    assert cached(result)[0] >= len(chat) - TOKENS - 90 - TOKENS - 2 * 64
    checked(pair.caching)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """An engine with pages on demand for little more than one sequence of the maximum length."""
    directory = build_example(tmp_path_factory.mktemp("few") / "cuda", kv_pages=FEW_PAGES)
    with ExitStack() as opened:
        yield opened_pair(opened, directory, "max-utilization")


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["none", "chain", "tree"])
def test_eviction_and_preemption_change_no_bit(few: Pair, shape: DraftShape | None) -> None:
    """Pages are evicted, and preempted sequences restart after the remaining pages."""
    ids = text_ids(few.cold)
    starts = (0, 0, 40, 40, 0, 500, 500, 0)
    prompts = [
        Prompt(str(i), ids[s : s + 250] + ids[2000 + 7 * i : 2010 + 17 * i])
        for i, s in enumerate(starts)
    ]
    params_of_requests = [params(i, 200) for i in range(8)]
    cold = outputs(records(few.cold, prompts, params_of_requests, shape))
    result = [r for _ in range(2) for r in records(few.caching, prompts, params_of_requests, shape)]
    assert outputs(result) == cold * 2
    assert sum(cached(result)) > 0
    assert few.caching.prefixes is not None
    assert few.caching.prefixes.statistics.evicted_pages > 0
    assert sum(record.stats.preemptions for record in result) > 0
    checked(few.caching)
