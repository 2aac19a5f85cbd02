"""Models with recurrent states on a GPU: their MTP layer, preemption, and snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from dense_models import GEOMETRIES, SIZES, VOCAB
from example_engine import (
    CHAIN,
    TREE,
    every_other_sampled,
    on_gpu,
    outputs,
    random_prompts,
    records,
)
from llama_checkpoints import write_llama
from qwen_predictors import add_qwen_predictor
from test_ragged_gpu import CHAIN as RAGGED_CHAIN
from test_ragged_gpu import AnyDepths

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.draft.policy import SequenceDepths
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.settings import RuntimeSettings

pytestmark = pytest.mark.timeout(600)

LENGTHS, TOKENS = (5, 230, 40, 17, 130, 64), 160
# A sequence of 512 tokens and its tree needs 9 pages of 64.
PAGES = 14
# The layer that resembles the MTP layer: it has keys and values.
ATTENTION_LAYER = 1


def build_hybrid(folder: Path, geometry: str, shape: DraftShape, **sizes: Any) -> Path:
    """Build the engine of a random checkpoint with its MTP layer."""
    kind, changes = GEOMETRIES[geometry]
    write_llama(folder / "model", kind, **SIZES | changes)
    add_qwen_predictor(folder / "model", like=ATTENTION_LAYER)
    options = BuildOptions.from_flat(
        model=folder / "model", draft=Path("mtp"), output=folder / "engine", backend="cuda",
        max_seq_len=512, page_size=64, **sizes, **asdict(shape),
    )  # fmt: skip
    build(options, SilentProgress())
    return options.output


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid-mtp")
    return build_hybrid(folder, request.param, TREE, max_batch_size=4, kv_pages=PAGES)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    """An engine with all pages that its sequences may need, so that none is preempted."""
    with on_gpu(directory) as engine:
        yield engine


@pytest.fixture(scope="module")
def on_demand(directory: Path) -> Iterator[Engine]:
    """An engine that preempts sequences when pages run out."""
    with on_gpu(directory, RuntimeSettings(kv_policy="max-utilization")) as engine:
        yield engine


@pytest.fixture(scope="module")
def caching(directory: Path) -> Iterator[Engine]:
    """An engine whose prompts resume at snapshots."""
    settings = RuntimeSettings(prefix_caching="on", state_snapshot_interval=64)
    with on_gpu(directory, settings) as engine:
        yield engine


def plain(engine: Engine) -> list[tuple[object, ...]]:
    """Return the records of each request alone, without a draft."""
    prompts, params = random_prompts(VOCAB, LENGTHS), every_other_sampled(len(LENGTHS), TOKENS)
    pairs = zip(prompts, params, strict=True)
    return [outputs(records(engine, [p], [requested], None))[0] for p, requested in pairs]


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_mtp_layer_and_other_sequences_change_no_bit(engine: Engine, shape: DraftShape) -> None:
    """Greedy and sampled requests: six in four rows, so that they join and leave."""
    prompts, params = random_prompts(VOCAB, LENGTHS), every_other_sampled(len(LENGTHS), TOKENS)
    together = records(engine, prompts, params, shape)
    assert outputs(together) == plain(engine)
    assert sum(sum(record.stats.acceptance_histogram[1:]) for record in together) > 0


@pytest.mark.parametrize("geometry", ["qwen3_5", "qwen3_next"])
def test_parts_of_chains_change_no_bit(
    geometry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any depths in ragged steps, greedy and sampled; twenty requests in eight rows."""
    count, policy = 20, AnyDepths()
    prompts = random_prompts(VOCAB, [5 + 37 * i % 190 for i in range(count)])
    params = every_other_sampled(count, TOKENS)
    with on_gpu(build_hybrid(tmp_path, geometry, RAGGED_CHAIN, max_batch_size=8)) as engine:
        expected = outputs(records(engine, prompts, params, None))
        monkeypatch.setattr(engine.decoder, "_default_policy", lambda *_, **__: policy)
        assert outputs(records(engine, prompts, params)) == expected
    ragged = [o for o in policy.outcomes if isinstance(o.shape, SequenceDepths)]
    assert len(ragged) > 10
    assert {d for o in ragged for d in o.depths} == set(range(RAGGED_CHAIN.draft_depth + 1))
    assert sum(sum(o.accepted) for o in ragged) > 0


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["none", "chain", "tree"])
def test_preemption_changes_no_bit(
    engine: Engine, on_demand: Engine, shape: DraftShape | None
) -> None:
    """A preempted sequence prefills its prompt again and replays its tokens."""
    prompts, params = random_prompts(VOCAB, LENGTHS), every_other_sampled(len(LENGTHS), TOKENS)
    result = records(on_demand, prompts, params, shape)
    assert sum(record.stats.preemptions for record in result) > 0
    assert outputs(result) == plain(engine)


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["none", "chain", "tree"])
def test_a_prompt_that_resumes_at_a_snapshot_has_the_bits_of_a_cold_run(
    engine: Engine, caching: Engine, shape: DraftShape | None
) -> None:
    """Hits at 64, 128 and 192 tokens, with other requests in between."""
    lengths = (65, 130, 230)
    prompts, params = random_prompts(VOCAB, lengths), every_other_sampled(len(lengths), 60)
    others = random_prompts(VOCAB, (20, 30))
    cold = outputs(records(engine, prompts, params, shape))
    for turn in range(2):
        for length, prompt, requested, expected in zip(lengths, prompts, params, cold, strict=True):
            (result,) = records(caching, [prompt], [requested], shape)
            assert outputs([result]) == [expected]
            if turn:
                assert result.stats.cached_tokens == (length - 1) // 64 * 64
            records(caching, others, every_other_sampled(len(others), 20), CHAIN)


@pytest.mark.slow
def test_100_000_tokens_are_equal_with_and_without_drafts(engine: Engine) -> None:
    """All pages of four rows are in use, and every second request uses sampling."""
    count, tokens = 250, 400
    prompts = random_prompts(VOCAB, [1 + 7 * i % 100 for i in range(count)])
    requested = every_other_sampled(count, tokens)
    assert count * tokens == 10**5
    without = outputs(records(engine, prompts, requested, None))
    assert all(len(ids) == tokens for ids, _ in without)
    for shape in (CHAIN, TREE):
        assert outputs(records(engine, prompts, requested, shape)) == without
