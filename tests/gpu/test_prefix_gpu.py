"""The prefix cache on a GPU: behind another prompt's pages a prompt has the bits of a cold run."""

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
# Views of all blocks: when a sequence takes its full steps changes no bit.
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
# Rows choose among all tokens: full attention's bits.
CHOICES: dict[str, Any] = {
    "dsa": True,
    "dsa_top_k": 1024,
    "dsa_threshold": 256,
    "dsa_recent_tokens": 16,
    "dsa_check_interval": 0,
}
# A sequence of 1024 tokens and its tree takes 17 pages of 64.
FEW_PAGES = 24


@dataclass
class Pair:
    """One engine directory twice: without a cache, and with one."""

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
    """Every other one samples."""
    sampling = SamplingParams(temperature=float(index % 2), seed=index)
    return GenerateParams(max_new_tokens=tokens, sampling=sampling, ignore_eos=True)


def cached(found: list[RunRecord]) -> list[int]:
    return [record.stats.cached_tokens for record in found]


def checked(engine: Engine) -> None:
    assert engine.prefixes is not None
    engine.prefixes.check_integrity()


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["none", "chain", "tree"])
@pytest.mark.parametrize("index", [0, 1], ids=["greedy", "sampled"])
def test_a_hit_has_the_bits_of_a_cold_run(pair: Pair, shape: DraftShape | None, index: int) -> None:
    """Tokens, log-probabilities and accepted drafts; another salt sees nothing of it."""
    first = {None: 0, CHAIN: 100, TREE: 200}[shape] + 50 * index
    ids = text_ids(pair.cold)[first : first + LENGTH]
    asked = replace(params(index), cache_salt=f"{shape} {index}")
    prompts = [Prompt("a", ids)]
    (cold,) = records(pair.cold, prompts, asked, shape)
    found = [records(pair.caching, prompts, asked, shape)[0] for _ in range(3)]
    salted = records(pair.caching, prompts, replace(asked, cache_salt="other"), shape)
    whole = (LENGTH - 1) // pair.page_size * pair.page_size
    assert cached([cold, *found]) == [0, 0, whole, whole]
    assert outputs([*found, *salted]) == outputs([cold] * 4)
    assert {r.stats.acceptance_histogram for r in found} == {cold.stats.acceptance_histogram}
    checked(pair.caching)


@pytest.mark.parametrize("shape", [None, CHAIN], ids=["none", "chain"])
def test_prompts_that_part_and_come_together(pair: Pair, shape: DraftShape | None) -> None:
    """Eight at once that begin alike for a while, three rounds: each as it is alone and cold."""
    ids = text_ids(pair.cold)
    prompts = [
        Prompt(str(i), ids[: 90 * i + 30] + ids[1000 + 97 * i : 1100 + 110 * i]) for i in range(8)
    ]
    asked = [params(i) for i in range(8)]
    cold = [
        outputs(records(pair.cold, [p], [a], shape))[0] for p, a in zip(prompts, asked, strict=True)
    ]
    for round_ in range(3):
        found = records(pair.caching, prompts, asked, shape)
        assert outputs(found) == cold, round_
        assert sum(cached(found)) > 1000
        checked(pair.caching)


def test_turns_of_a_chat(pair: Pair) -> None:
    """Each prompt holds the answer before it, whose pages are read as a prompt's are."""
    ids, chat = text_ids(pair.cold), ()
    for turn in range(6):
        chat += ids[100 * turn : 100 * turn + 90]
        prompts, asked = [Prompt("a", chat)], params(turn)
        cold, found = (records(e, prompts, asked, CHAIN) for e in (pair.cold, pair.caching))
        assert outputs(found) == outputs(cold)
        chat += found[0].output_ids
    assert cached(found)[0] >= len(chat) - TOKENS - 90 - TOKENS - 2 * 64
    checked(pair.caching)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Pages for little more than one sequence of the longest length, which come on demand."""
    directory = build_example(tmp_path_factory.mktemp("few") / "cuda", kv_pages=FEW_PAGES)
    with ExitStack() as opened:
        yield opened_pair(opened, directory, "max-utilization")


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["none", "chain", "tree"])
def test_few_pages_lose_beginnings_and_no_bit(few: Pair, shape: DraftShape | None) -> None:
    """Pages are evicted, sequences are preempted, and begin again behind what is left."""
    ids = text_ids(few.cold)
    starts = (0, 0, 40, 40, 0, 500, 500, 0)
    prompts = [
        Prompt(str(i), ids[s : s + 250] + ids[2000 + 7 * i : 2010 + 17 * i])
        for i, s in enumerate(starts)
    ]
    asked = [params(i, 200) for i in range(8)]
    cold = outputs(records(few.cold, prompts, asked, shape))
    found = [r for _ in range(2) for r in records(few.caching, prompts, asked, shape)]
    assert outputs(found) == cold * 2
    assert sum(cached(found)) > 0
    assert few.caching.prefixes is not None
    assert few.caching.prefixes.statistics.evicted_pages > 0
    assert sum(record.stats.preemptions for record in found) > 0
    checked(few.caching)
