"""DSA on a GPU: the bits of full attention if required, drafts without effect, counts."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
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

THRESHOLD, TOKENS, FEW = 256, 96, 64
CHECK_INTERVAL = 4
FULL = range(1, 24, 2)


def built(model: Path, output: Path, **changes: Any) -> Path:
    options = {
        "max_batch_size": 4,
        "dsa": True,
        "dsa_top_k": 1024,
        "dsa_threshold": THRESHOLD,
        "dsa_recent_tokens": 16,
        "dsa_check_interval": CHECK_INTERVAL,
    }
    return build_example(output, model=model, **options | changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with indexers from its own projections."""
    target = linked_target(tmp_path_factory.mktemp("dsa"))
    write_derived_indexers(target, EXAMPLE / "target" / "model.safetensors", FULL, width=64)
    return target


@pytest.fixture(scope="module")
def checking(model: Path) -> Iterator[Engine]:
    with on_gpu(built(model, model.parent / "cuda")) as engine:
        yield engine


@pytest.fixture(scope="module")
def sparse_engine(checking: Engine) -> Engine:
    """The engine with every selecting step sparse and none checked."""
    return renumbered(checking, check_interval=0)


def renumbered(engine: Engine, **changes: Any) -> Engine:
    """Return the engine with other settings that are not part of its programs."""
    dsa = engine.manifest.dsa
    assert dsa is not None
    numbers = replace(dsa, **changes)
    return Engine(replace(engine.manifest, dsa=numbers), engine.executor, text=engine.text)


@pytest.fixture(scope="module")
def latent(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose layers all cache latents of full rank; those with indexers gather them."""
    target = linked_target(tmp_path_factory.mktemp("dsa-latent"), model)
    write_factors(target, EXAMPLE / "target" / "model.safetensors", range(24), rank=96)
    with on_gpu(built(target, target.parent / "cuda")) as engine:
        yield renumbered(engine, check_interval=0)


@pytest.mark.parametrize("shape", [None, CHAIN], ids=["none", "chain"])
def test_rows_select_tokens_within_partial_views(
    model: Path, tmp_path: Path, shape: DraftShape | None
) -> None:
    """The keys are fp8. Selecting all tokens of a view has the bits of the view."""
    directory = built(
        model, tmp_path / "views", dsa_key_dtype="fp8", specpv=True,
        specpv_n_retrieval_blocks=8, specpv_partial_threshold=256, specpv_full_refresh_interval=12,
    )  # fmt: skip
    with on_gpu(directory) as engine:
        viewing = renumbered(engine, check_interval=0)
        whole, chosen = decode(viewing, shape, 0), decode(viewing, shape, None)
        sparse = decode(viewing, shape, FEW)
    assert outputs(chosen) == outputs(whole)
    for record, before in zip(sparse[1:], whole[1:], strict=True):
        assert record.logprobs != before.logprobs
        assert record.stats.dsa is not None and record.stats.dsa.broken_lists == 0
        assert record.stats.specpv is not None and record.stats.specpv.partial_steps > 4


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["none", "chain", "tree"])
def test_selecting_all_latents_has_the_bits_of_full_attention(
    latent: Engine, shape: DraftShape | None
) -> None:
    whole, chosen = decode(latent, shape, 0), decode(latent, shape, None)
    assert outputs(chosen) == outputs(whole)
    sparse = decode(latent, shape, FEW)
    assert outputs(sparse) == outputs(decode(latent, None, FEW))
    assert outputs(sparse)[0] == outputs(whole)[0]
    assert all(a.logprobs != b.logprobs for a, b in zip(sparse[1:], whole[1:], strict=True))
    for record in (*chosen, *sparse):
        assert record.stats.dsa is not None and record.stats.dsa.broken_lists == 0


def texts(engine: Engine) -> list[Prompt]:
    """Return prompts below the threshold, some that cross it during decoding, and some above it."""
    assert engine.text is not None
    ids = engine.text.encode(inspect.getsource(textwrap), raw=True, most_tokens=1 << 15)
    return [Prompt(str(n), prompt_ids=ids[7 * n : 7 * n + n]) for n in (40, 200, 250, 700, 420)]


def decode(engine: Engine, shape: DraftShape | None, top_k: int | None) -> list[RunRecord]:
    params = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True, dsa_top_k=top_k)
    return records(engine, texts(engine), params, shape)


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["none", "chain", "tree"])
def test_selecting_everything_has_the_bits_of_full_attention(
    sparse_engine: Engine, shape: DraftShape | None
) -> None:
    whole, chosen = decode(sparse_engine, shape, 0), decode(sparse_engine, shape, None)
    assert outputs(chosen) == outputs(whole)
    for record in chosen:
        assert record.stats.dsa is not None and record.stats.dsa.broken_lists == 0
    sparse = [r.stats.dsa.narrowed_steps for r in chosen if r.stats.dsa is not None]
    assert sparse[0] == 0 and all(sparse[1:])


def test_exact_has_the_bits_of_an_engine_without_indexers(
    sparse_engine: Engine, engine: Engine
) -> None:
    params = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    expected = records(engine, texts(engine), params, None)
    lossy = renumbered(sparse_engine, top_k=FEW)
    assert outputs(records(lossy, texts(engine), params, None)) != outputs(expected)
    exact = records(lossy, texts(engine), replace(params, exact=True), "default")
    assert outputs(exact) == outputs(expected)
    assert all(record.stats.mean_acceptance_length == 1.0 for record in exact)


def test_a_draft_changes_no_token_and_no_bit_of_a_logprob(sparse_engine: Engine) -> None:
    plain = decode(sparse_engine, None, FEW)
    for shape in (CHAIN, TREE):
        assert outputs(decode(sparse_engine, shape, FEW)) == outputs(plain)
    whole = decode(sparse_engine, None, 0)
    # Below the threshold nothing is sparse, also in a batch with sparse rows.
    assert outputs(plain)[0] == outputs(whole)[0]
    assert all(a.logprobs != b.logprobs for a, b in zip(plain[1:], whole[1:], strict=True))
    assert all(r.stats.dsa is not None and r.stats.dsa.broken_lists == 0 for r in plain)


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["none", "chain", "tree"])
def test_checks_emit_the_bits_of_full_attention(checking: Engine, shape: DraftShape | None) -> None:
    whole = decode(checking, shape, 0)
    always = renumbered(checking, check_interval=1, min_agreement=0.0)
    checked = decode(always, shape, FEW)
    counts = [record.stats.dsa for record in checked]
    if shape is None:
        assert outputs(checked) == outputs(whole)
    assert all(s is not None and s.narrowed_steps == s.broken_lists == 0 for s in counts)
    beyond = [s for s in counts[1:] if s is not None]
    assert all(s.checked_steps > 8 and s.agreement is not None for s in beyond)
    print(f"agreement with {FEW} tokens: {[round(s.agreement or 0, 3) for s in beyond]}")
    assert any(s.agreement is not None and s.agreement < 1 for s in beyond)
    # Selecting every token always agrees.
    everything = [record.stats.dsa for record in decode(always, shape, None)]
    assert all(s is not None and s.agreement == 1.0 for s in everything[1:])


def test_low_agreement_falls_back(checking: Engine) -> None:
    strict = decode(renumbered(checking, min_agreement=1.0), CHAIN, 1)
    lenient = decode(renumbered(checking, min_agreement=0.0), CHAIN, 1)
    for fallen, kept in zip(strict[1:], lenient[1:], strict=True):
        assert fallen.stats.dsa is not None and kept.stats.dsa is not None
        assert kept.stats.dsa.fallback_steps == 0 and kept.stats.dsa.narrowed_steps > 0
        if fallen.stats.dsa.checked_steps >= 12 and fallen.stats.dsa.agreement != 1.0:
            assert fallen.stats.dsa.fallback_steps > 0


def test_selected_tokens_equal_the_cpu_engine(model: Path, sparse_engine: Engine) -> None:
    """Use prompts below the threshold: on the CPU, rows of longer prompts are sparse too."""
    output = model.parent / "cpu"
    cpu = Engine.load(built(model, output, backend="cpu", dsa_check_interval=0))
    distances: list[list[float]] = [[], []]
    params = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True, dsa_top_k=FEW)
    prompts = texts(cpu)[1:3]
    desired = records(cpu, prompts, params, None)
    for distance, top_k in zip(distances, (FEW, 0), strict=True):
        sampling = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True, dsa_top_k=top_k)
        for actual, expected in zip(
            records(sparse_engine, prompts, sampling, None), desired, strict=True
        ):
            pairs = zip(actual.output_ids, expected.output_ids, strict=True)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), TOKENS)
            first = THRESHOLD - len(expected.prompt_ids) + 1
            assert expected.logprobs is not None and actual.logprobs is not None
            near = np.subtract(actual.logprobs[first:same], expected.logprobs[first:same])
            distance.extend(np.abs(near).tolist())
    chosen, everything = (float(np.median(result)) for result in distances)
    print(f"median distance of log-probabilities: {chosen:.4f}, attending to all {everything:.4f}")
    assert len(distances[0]) > 20
    assert chosen < everything
