"""Engines with DSA on the CPU: exact if required, reported as lossy, checked, with fallback."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_draft, write_target
from command_line import Command
from indexer_files import write_indexers
from latent_files import write_factors, write_latents
from view_engines import SHAPES, SPECPV, built

from specbuild.runtime.decode.decoder import Speculation
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError
from specbuild.runtime.executors.cpu.executor import CpuExecutor
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

DSA = {"dsa": True, "dsa_top_k": 120, "dsa_threshold": 40, "dsa_recent_tokens": 8}
NARROW = 6


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dsa")
    for name in ("t", "full rank"):
        write_target(path / name, tokenizer=True, vocab=272)
        write_indexers(path / name, [1, 3])
    write_latents(path / "t", {0: 12, 1: 20})
    write_factors(path / "full rank", path / "full rank" / "model.safetensors", [0, 1, 3], 64)
    write_draft(path / "d", target_vocab=272)
    return path


@pytest.fixture(scope="module")
def engine_path(checkpoints: Path) -> Path:
    """An engine with every lossy method; requests disable those that they do not use.

    A sliding and a full layer cache latents, so that indexers select the blocks of views.
    """
    return built(checkpoints, "engine", **DSA, **SPECPV, specpv_score="indexer")


@pytest.fixture(scope="module")
def plain_path(checkpoints: Path) -> Path:
    """The same target without lossy methods."""
    return built(checkpoints, "plain", dsa=False)


@pytest.fixture(scope="module")
def engine(engine_path: Path) -> Engine:
    return Engine.load(engine_path)


def prompts() -> list[Prompt]:
    rng = np.random.default_rng(5)
    return [
        Prompt(str(n), prompt_ids=tuple(rng.integers(3, 270, length).tolist()))
        for n, length in enumerate((90, 20, 41))
    ]


def unchecked(engine: Engine, **changes: Any) -> Engine:
    """Return the engine without checks, or with other settings that are not part of its graphs."""
    dsa = engine.manifest.dsa
    assert dsa is not None
    numbers = replace(dsa, **{"check_interval": 0, **changes})
    return Engine(replace(engine.manifest, dsa=numbers), engine.executor, text=engine.text)


def decode(
    engine: Engine, shape: Speculation, requests: list[Prompt] | None = None, **params: Any
) -> list[RunRecord]:
    blocks = None if engine.manifest.specpv is None else 0
    defaults = {"max_new_tokens": 40, "specpv_retrieval_blocks": blocks}
    sampling = GenerateParams(ignore_eos=True, **{**defaults, **params})
    records = {
        event.request: event.record
        for event in engine.generate(requests or prompts(), sampling, speculation=shape)
        if isinstance(event, FinishEvent)
    }
    return [records[i] for i in range(len(records))]


def tokens(records: list[RunRecord]) -> list[tuple[int, ...]]:
    return [record.output_ids for record in records]


@pytest.mark.parametrize("views", [0, None], ids=["whole", "views"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_selecting_every_token_has_the_bits_of_full_attention(
    engine: Engine, shape: DraftShape | None, views: int | None
) -> None:
    """The indexer may select as many tokens as these contexts have."""
    options = {"max_new_tokens": 16, "specpv_retrieval_blocks": views}
    whole = decode(engine, shape, dsa_top_k=0, **options)
    chosen = decode(unchecked(engine), shape, **options)
    for one, two in zip(whole, chosen, strict=True):
        assert (two.output_ids, two.logprobs) == (one.output_ids, one.logprobs)
        assert one.stats.dsa is not None and two.stats.dsa is not None
        assert two.stats.dsa.broken_lists == one.stats.dsa.narrowed_steps == 0
        assert two.stats.specpv == one.stats.specpv
    assert chosen[0].stats.dsa is not None and chosen[0].stats.dsa.narrowed_steps > 3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_selects_tokens_within_partial_views(engine: Engine, shape: DraftShape | None) -> None:
    options = {"max_new_tokens": 24, "specpv_retrieval_blocks": None}
    whole = decode(engine, shape, dsa_top_k=0, **options)[0]
    chosen = decode(unchecked(engine), shape, dsa_top_k=NARROW, **options)[0]
    assert chosen.logprobs != whole.logprobs
    assert chosen.stats.dsa is not None and chosen.stats.dsa.broken_lists == 0
    assert chosen.stats.dsa.narrowed_steps > 4
    assert chosen.stats.specpv is not None and chosen.stats.specpv.partial_steps > 4


@pytest.mark.parametrize("shape", [None, SHAPES[-1]], ids=str)
def test_contexts_below_the_threshold_have_the_bits_of_full_attention(
    engine: Engine, shape: DraftShape | None
) -> None:
    """The context has 20 tokens and 16 are generated.

    Sequences run alone: ONNX Runtime's bits depend on the number of rows of a launch.
    """
    short, options = prompts()[1:2], {"max_new_tokens": 16}
    narrow = decode(unchecked(engine), shape, short, dsa_top_k=1, **options)[0]
    whole = decode(engine, shape, short, dsa_top_k=0, **options)[0]
    assert (narrow.output_ids, narrow.logprobs) == (whole.output_ids, whole.logprobs)
    assert narrow.stats.dsa is not None and narrow.stats.dsa.narrowed_steps == 0
    longer = {"max_new_tokens": 60}
    narrow = decode(unchecked(engine), shape, short, dsa_top_k=1, **longer)[0]
    whole = decode(engine, shape, short, dsa_top_k=0, **longer)[0]
    assert narrow.logprobs != whole.logprobs
    assert narrow.stats.dsa is not None and narrow.stats.dsa.narrowed_steps > 4


def prompt_pools(path: Path, **params: Any) -> tuple[RunRecord, dict[str, np.ndarray]]:
    """Return the tokens that an engine samples after a prompt of 90, and the target's pools."""
    engine = Engine.load(path)
    assert isinstance(engine.executor, CpuExecutor)
    record = decode(engine, None, prompts()[:1], max_new_tokens=1, **params)[0]
    pools = engine.executor.pools
    return record, {name: pool.numpy() for name, pool in pools.items()}


def test_prompts_attend_to_everything(plain_path: Path, engine_path: Path) -> None:
    """A prompt longer than the selection leaves the caches of an engine without indexers."""
    plain, expected = prompt_pools(plain_path)
    sparse, pools = prompt_pools(engine_path, dsa_top_k=NARROW)
    assert sparse.stats.dsa is not None and sparse.stats.dsa.top_k == NARROW
    assert (sparse.output_ids, sparse.logprobs) == (plain.output_ids, plain.logprobs)
    assert {"full.3.k_pool", "latent.1.c_pool"} <= expected.keys() <= pools.keys()
    for name, pool in expected.items():
        assert pool.any()
        shared = min(len(pool), len(pools[name]))
        np.testing.assert_array_equal(pools[name][:shared], pool[:shared], err_msg=name)


def test_exact_requests_equal_plain_decoding(plain_path: Path, engine: Engine) -> None:
    """Compare an engine without indexers and views with one whose requests use both and a draft."""
    lossy = unchecked(engine, top_k=NARROW)
    expected = decode(Engine.load(plain_path), None)
    options = {"specpv_retrieval_blocks": None}
    assert tokens(decode(lossy, None, **options)) != tokens(expected)
    exact = decode(lossy, "default", exact=True, **options)
    assert tokens(exact) == tokens(expected)
    assert [record.stats.mean_acceptance_length for record in exact] == [1.0] * 3


def test_full_attention_after_a_prompt_equals_plain_decoding(
    plain_path: Path, engine: Engine
) -> None:
    expected = decode(Engine.load(plain_path), None)
    for shape in SHAPES:
        assert tokens(decode(engine, shape, dsa_top_k=0)) == tokens(expected)


def test_a_draft_changes_no_token_of_sparse_attention(engine: Engine) -> None:
    plain = decode(unchecked(engine), None, dsa_top_k=NARROW)
    for shape in SHAPES[1:]:
        assert tokens(decode(unchecked(engine), shape, dsa_top_k=NARROW)) == tokens(plain)


def test_checks_emit_the_tokens_of_full_attention_and_count_differences(engine: Engine) -> None:
    """With a check at every step, the tokens equal those of full attention."""
    checked = unchecked(engine, check_interval=1, min_agreement=0.0)
    records = decode(checked, None, dsa_top_k=NARROW)
    assert tokens(records) == tokens(decode(engine, None, dsa_top_k=0))
    for record, steps in zip(records, (39, 19, 39), strict=True):
        stats = record.stats.dsa
        assert stats is not None
        assert (stats.checked_steps, stats.checked_tokens, stats.narrowed_steps) == (
            steps, steps, 0,
        )  # fmt: skip
        assert stats.agreement == stats.agreed_tokens / steps
    assert any(r.stats.dsa and r.stats.dsa.agreed_tokens < 39 for r in records)


def test_low_agreement_falls_back_and_is_reported(engine: Engine) -> None:
    strict = unchecked(engine, check_interval=4, min_agreement=1.0)
    lenient = unchecked(engine, check_interval=4, min_agreement=0.0)
    shape = SHAPES[-1]
    strict_stats, lenient_stats = (
        decode(e, shape, dsa_top_k=1)[0].stats.dsa for e in (strict, lenient)
    )
    assert strict_stats is not None and lenient_stats is not None
    assert strict_stats.agreement is not None and strict_stats.agreement < 1.0
    assert strict_stats.fallback_steps > 4 and strict_stats.checked_steps > 8
    assert lenient_stats.fallback_steps == 0 and lenient_stats.narrowed_steps > 4


class Spoiled(CpuExecutor):
    """An engine whose launches all report invalid lists."""

    def run(self, role: str, feeds: Any) -> dict[str, np.ndarray]:
        outputs = super().run(role, feeds)
        if role == "target":
            outputs["indexer.violations"] = outputs["indexer.violations"] + 1
        return outputs


def test_invalid_lists_are_counted(engine_path: Path, engine: Engine) -> None:
    spoiled = Engine.load(engine_path)
    spoiled.executor.__class__ = Spoiled
    stats = decode(spoiled, None, max_new_tokens=5)[0].stats.dsa
    # Four steps with two layers each; the first steps run twice.
    assert stats is not None and (stats.broken_launches, stats.broken_lists) == (8, 16)
    sound = decode(engine, None, max_new_tokens=5)[0].stats.dsa
    assert sound is not None and sound.broken_launches == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_view_of_everything_is_bit_equal(engine: Engine, shape: DraftShape | None) -> None:
    """Views contain keys, latents and indexer keys, whose groups have separate pages."""
    for top_k in (0, NARROW):
        options = {"max_new_tokens": 16, "dsa_top_k": top_k}
        whole = decode(unchecked(engine), shape, **options)
        views = decode(unchecked(engine), shape, specpv_retrieval_blocks=None, **options)
        for one, two in zip(whole, views, strict=True):
            assert (two.output_ids, two.logprobs) == (one.output_ids, one.logprobs)
            assert two.stats.specpv is not None and two.stats.specpv.partial_steps > 2


COMBINATIONS = {
    "alone": {"no_mla": True},
    "SpecPV": {"no_mla": True, **SPECPV},
    "latents": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINATIONS)
def test_equals_an_engine_without_indexers_if_it_selects_every_token(
    checkpoints: Path, name: str
) -> None:
    """The bits are equal, though the graph has more nodes."""
    options = COMBINATIONS[name]
    plain = Engine.load(built(checkpoints, f"plain {name}", dsa=False, **options))
    chosen = unchecked(Engine.load(built(checkpoints, f"dsa {name}", **DSA, **options)))
    for shape in SHAPES:
        sampling = {"max_new_tokens": 24, "specpv_retrieval_blocks": None}
        expected = decode(plain, shape, **sampling)
        for top_k in (None, 0):
            for one, two in zip(
                expected, decode(chosen, shape, dsa_top_k=top_k, **sampling), strict=True
            ):
                assert (two.output_ids, two.logprobs) == (one.output_ids, one.logprobs)
                assert two.stats.specpv == one.stats.specpv and one.stats.dsa is None
        sparse = decode(chosen, shape, dsa_top_k=NARROW, **sampling)
        assert sparse[0].logprobs != expected[0].logprobs
        stats = sparse[0].stats.dsa
        assert stats is not None and stats.narrowed_steps > 4 and stats.broken_lists == 0


@pytest.mark.slow
def test_views_of_latents_have_the_positions_of_their_tokens(checkpoints: Path) -> None:
    """Factors of full rank give the same model: keys are rebuilt at the positions in the view."""
    options = {**DSA, **SPECPV, "specpv_score": "indexer"}
    latent, plain = (
        unchecked(Engine.load(built(checkpoints, f"rank {no_mla}", "full rank", no_mla=no_mla,
                                    **options)))
        for no_mla in (False, True)
    )  # fmt: skip
    assert [g.name for g in latent.manifest.cache_groups][:2] == ["latent", "sliding"]
    for shape in SHAPES:
        for top_k in (0, NARROW):
            sampling = {"max_new_tokens": 30, "specpv_retrieval_blocks": 2, "dsa_top_k": top_k}
            for one, two in zip(
                decode(latent, shape, **sampling), decode(plain, shape, **sampling), strict=True
            ):
                assert one.stats.specpv is not None and one.stats.specpv.partial_steps > 4
                assert one.output_ids == two.output_ids
                np.testing.assert_allclose(one.logprobs, two.logprobs, atol=2e-4)


def test_an_engine_without_dsa_rejects_dsa_top_k(engine: Engine) -> None:
    plain = Engine(replace(engine.manifest, dsa=None), engine.executor, text=engine.text)
    with pytest.raises(RequestError, match="dsa_top_k is 4, but the engine was built without DSA"):
        plain.check_prompts(prompts(), GenerateParams(dsa_top_k=4))
    with pytest.raises(RequestError, match="the engine chooses 0 to 120 tokens"):
        engine.check_prompts(prompts(), GenerateParams(dsa_top_k=121))


def test_inspect_shows_the_cache_group_and_the_warning(engine: Engine) -> None:
    groups = {group.name: group for group in engine.manifest.cache_groups}
    names = ["full", "latent", "sliding", "latent_sliding", "indexer", "draft"]
    assert list(groups) == names
    assert groups["indexer"].layers == (1, 3)
    assert groups["indexer"].pool_widths(3) == {"k": 8}
    assert any("--no-dsa leaves it out" in warning for warning in engine.manifest.warnings)


def test_the_command_line_reports_the_engine_as_lossy(
    command: Command, checkpoints: Path, engine_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": p.id, "prompt_ids": list(p.prompt_ids or ())}) for p in prompts()]
    file.write_text("\n".join(lines))
    arguments = ("run", engine_path, "--prompts", file, "--ignore-eos", "--max-new-tokens", "20")
    summary = command(*arguments, "--dsa-top-k", "4")
    assert "DSA (lossy)" in summary.err and "checked steps" in summary.err
    result = command(*arguments, "--dsa-top-k", "4", "--json", "--no-spec")
    stats = [json.loads(line)["stats"]["dsa"] for line in result.out.splitlines()]
    assert [s["top_k"] for s in stats] == [4, 4, 4]
    assert [s["checked_steps"] for s in stats] == [8, 0, 8]
    plain = [json.loads(line) for line in command(*arguments, "--exact", "--json").out.splitlines()]
    assert [line["stats"]["dsa"]["top_k"] for line in plain] == [0, 0, 0]
    assert [line["stats"]["specpv"]["partial_steps"] for line in plain] == [0, 0, 0]
    assert [line["stats"]["mean_acceptance_length"] for line in plain] == [1.0] * 3
    refused = command(*arguments, "--dsa-top-k", "121")
    assert refused.code == 2 and "chooses 0 to 120 tokens" in refused.err
    inspected = " ".join(command("inspect", engine_path).out.replace("│", " ").split())
    assert "lossy: 2 layers (2 indexer heads of 8) attend from position 40" in inspected
    assert "KV cache, indexer" in inspected
    output = ("build", "--model", checkpoints / "t", "--output", tmp_path / "e")
    refused = command(*output, "--dsa-top-k", 4)
    assert refused.code == 2 and "--dsa-top-k needs --dsa; add it" in refused.err
    refused = command(*output, "--dsa", "--backend", "cuda")
    assert refused.code == 2 and "build with --backend cpu" in refused.err
    refused = command(
        *output, "--draft", checkpoints / "d", "--dsa", "--dsa-recent-tokens", 3,
        "--dsa-threshold", 64, "--draft-top-k", 1, "--draft-depth", 3,
    )  # fmt: skip
    assert refused.code == 2 and "does not cover a draft of depth 3" in refused.err
