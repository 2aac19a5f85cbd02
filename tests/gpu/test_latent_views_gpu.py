"""SpecPV with latents on a GPU: indexers select blocks, keys are rebuilt at their positions."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
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
from latent_files import write_factors

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import GenerateParams, Prompt

LAYERS, FULL = range(24), range(1, 24, 2)
FULL_RANK = 128
FEW_BLOCKS, FEW_TOKENS = 4, 48
OPTIONS: dict[str, Any] = {
    "max_seq_len": 768,
    "max_batch_size": 4,
    "dsa": True,
    "dsa_top_k": 1024,
    "dsa_threshold": 256,
    "dsa_recent_tokens": 16,
    "dsa_check_interval": 0,
    "specpv": True,
    "specpv_score": "indexer",
    "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 48,
    "specpv_n_window_blocks": 2,
    "specpv_partial_threshold": 128,
    "specpv_full_refresh_interval": 6,
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """The example with keys and values as latents of full rank, and unchanged."""
    folder = tmp_path_factory.mktemp("latent-views")
    model, weights = linked_target(folder), EXAMPLE / "target" / "model.safetensors"
    write_derived_indexers(model, weights, FULL, width=64)
    write_factors(model, weights, LAYERS, rank=FULL_RANK)
    folders = {
        name: build_example(folder / name, model=model, no_mla=name == "keys", **OPTIONS)
        for name in ("latents", "keys")
    }
    with on_gpu(folders["latents"]) as latents, on_gpu(folders["keys"]) as keys:
        yield latents, keys


def decode(
    engine: Engine, shape: DraftShape | None, *, blocks: int | None, top_k: int = 0
) -> list[RunRecord]:
    assert engine.text is not None
    ids = engine.text.encode(inspect.getsource(textwrap), raw=True, most_tokens=1 << 15)
    lengths = (600, 90, 333, 40, 480)
    prompts = [Prompt(str(i), prompt_ids=ids[7 * n : 8 * n]) for i, n in enumerate(lengths)]
    params = GenerateParams(
        max_new_tokens=64, ignore_eos=True, specpv_retrieval_blocks=blocks, dsa_top_k=top_k
    )
    return records(engine, prompts, params, shape)


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["none", "chain", "tree"])
def test_a_view_of_all_latents_changes_no_bit(
    engines: tuple[Engine, Engine], shape: DraftShape | None
) -> None:
    latents, _ = engines
    whole, viewed = (decode(latents, shape, blocks=blocks) for blocks in (0, None))
    assert outputs(viewed) == outputs(whole) == outputs(decode(latents, None, blocks=0))
    for record in viewed:
        assert record.stats.specpv is not None and record.stats.specpv.invariant_failures == 0
    assert sum(r.stats.specpv.partial_steps for r in viewed if r.stats.specpv) > 30


@pytest.mark.parametrize("top_k", [0, FEW_TOKENS], ids=["views", "lists in views"])
def test_small_views_of_latents_equal_views_of_keys(
    engines: tuple[Engine, Engine], top_k: int
) -> None:
    """Factors of full rank give the same model, so both attend to the same tokens."""
    latents, keys = engines
    result, again, expected = (
        decode(engine, None, blocks=FEW_BLOCKS, top_k=top_k) for engine in (latents, latents, keys)
    )
    whole = decode(latents, None, blocks=0)
    assert outputs(result) == outputs(again)
    near = far = 0.0
    for actual, desired, all_seen in zip(result, expected, whole, strict=True):
        pairs = zip(actual.output_ids, desired.output_ids, all_seen.output_ids, strict=True)
        same = next((i for i, ids in enumerate(pairs) if len(set(ids)) > 1), len(actual.output_ids))
        assert actual.logprobs and desired.logprobs and all_seen.logprobs
        near += float(np.abs(np.subtract(actual.logprobs, desired.logprobs)[:same]).sum())
        far += float(np.abs(np.subtract(actual.logprobs, all_seen.logprobs)[:same]).sum())
        if actual.stats.dsa is not None:
            assert actual.stats.dsa.broken_lists == 0
    assert 2 * near < far, (near, far)
