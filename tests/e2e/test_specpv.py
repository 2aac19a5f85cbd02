"""Engines with SpecPV on the CPU: exact if required, and reported as lossy otherwise."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_draft, write_target
from command_line import Command
from latent_files import write_latents
from left_out import slow
from view_engines import SHAPES, SPECPV, built

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("specpv")
    write_target(path / "t", tokenizer=True, vocab=272)
    write_draft(path / "d", target_vocab=272)
    return path


@pytest.fixture(scope="module")
def specpv_engine(checkpoints: Path) -> Path:
    return built(checkpoints, "engine", **SPECPV)


def prompts() -> list[Prompt]:
    rng = np.random.default_rng(5)
    lengths = (90, 20, 41)
    return [
        Prompt(str(n), prompt_ids=tuple(rng.integers(3, 270, length).tolist()))
        for n, length in enumerate(lengths)
    ]


def decode(engine: Engine, shape: DraftShape | None, **params: Any) -> list[RunRecord]:
    sampling = GenerateParams(ignore_eos=True, **{"max_new_tokens": 40, **params})
    records = {
        event.request: event.record
        for event in engine.generate(prompts(), sampling, speculation=shape)
        if isinstance(event, FinishEvent)
    }
    return [records[i] for i in range(len(records))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_view_of_everything_is_bit_equal(specpv_engine: Path, shape: DraftShape | None) -> None:
    """Compare up to the first full step, since ONNX Runtime's bits depend on the number of rows.

    These contexts have at most twelve blocks of eight tokens.
    """
    engine = Engine.load(specpv_engine)
    whole = decode(engine, shape, specpv_retrieval_blocks=0, max_new_tokens=24)
    views = decode(engine, shape, max_new_tokens=24)
    for one, other in zip(whole, views, strict=True):
        assert one.stats.specpv is not None and other.stats.specpv is not None
        assert one.stats.specpv.partial_steps == 0
        assert other.stats.specpv.partial_steps > 4
        assert other.output_ids == one.output_ids
        assert other.logprobs == one.logprobs


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_engines_without_partial_steps_equal_plain_decoding(
    checkpoints: Path, specpv_engine: Path, shape: DraftShape | None
) -> None:
    """Use ``full_refresh_interval`` 0, and an engine that was built without SpecPV."""
    plain, loaded = Engine.load(built(checkpoints, "plain")), Engine.load(specpv_engine)
    specpv = loaded.manifest.specpv
    assert specpv is not None
    never = replace(specpv, full_refresh_interval=0)
    full = Engine(replace(loaded.manifest, specpv=never), loaded.executor, text=loaded.text)
    expected = [record.output_ids for record in decode(plain, None)]
    records = decode(full, shape)
    assert [record.output_ids for record in records] == expected
    assert all(r.stats.specpv is not None and r.stats.specpv.partial_steps == 0 for r in records)


def test_sliding_layers_may_cache_latents(tmp_path: Path) -> None:
    """Compare tokens of a view of everything, with a full step at least every 30 steps."""
    write_target(tmp_path / "t", tokenizer=True, vocab=272)
    write_draft(tmp_path / "d", target_vocab=272)
    write_latents(tmp_path / "t", {0: 12, 2: 20})
    engine = Engine.load(built(tmp_path, "engine", **SPECPV))
    assert [g.name for g in engine.manifest.cache_groups] == ["full", "latent_sliding", "draft"]
    for shape in (None, SHAPES[-1]):
        whole = decode(engine, shape, specpv_retrieval_blocks=0)
        for one, other in zip(whole, decode(engine, shape), strict=True):
            assert other.stats.specpv is not None
            assert other.stats.specpv.partial_steps > 4 and other.stats.specpv.full_steps > 1
            assert other.output_ids == one.output_ids


def test_a_full_step_restores_the_exact_cache(specpv_engine: Path) -> None:
    """After a full step, tokens have the log-probabilities of a run without partial steps.

    The tokens of the lossy run are the prompt of the exact one.
    """
    engine = Engine.load(specpv_engine)
    lossy = decode(engine, None, specpv_retrieval_blocks=1)[0]
    assert lossy.stats.specpv is not None and lossy.logprobs is not None
    assert lossy.stats.specpv.agreed_tokens < lossy.stats.specpv.rechecked_tokens
    ids = (*lossy.prompt_ids, *lossy.output_ids)

    def fresh(emitted: int) -> float:
        prompt = Prompt("fresh", prompt_ids=ids[: len(lossy.prompt_ids) + emitted])
        params = GenerateParams(max_new_tokens=1, ignore_eos=True, specpv_retrieval_blocks=0)
        *_, last = engine.generate([prompt], params, speculation=None)
        assert isinstance(last, FinishEvent) and last.record.logprobs is not None
        return last.record.logprobs[0]

    # Token 0 is from prefill, 1 from the first full step; then up to 30 partial steps follow.
    exact = [abs(fresh(i) - lossy.logprobs[i]) < 2e-5 for i in range(40)]
    full = [i for i, holds in enumerate(exact) if holds]
    assert full[:2] == [0, 1]
    assert 32 in full
    assert sum(exact) < 15


def test_the_command_line_reports_the_engine_as_lossy(
    command: Command, checkpoints: Path, specpv_engine: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"id": p.id, "prompt_ids": list(p.prompt_ids or ())} for p in prompts()]
    file.write_text("\n".join(map(json.dumps, lines)))
    arguments = ("run", specpv_engine, "--prompts", file, "--ignore-eos", "--max-new-tokens", "20")
    summary = command(*arguments, "--specpv-retrieval-blocks", "1")
    assert "SpecPV (lossy)" in summary.err and "partial" in summary.err
    result = command(*arguments, "--specpv-retrieval-blocks", "auto", "--json", "--no-spec")
    stats = [json.loads(line)["stats"]["specpv"] for line in result.out.splitlines()]
    assert [s["retrieval_blocks"] for s in stats] == [12, 12, 12]
    assert all(s["retrieval_reason"].startswith("12 blocks of 8 for up to ") for s in stats)
    assert all(s["partial_steps"] > 0 and s["invariant_failures"] == 0 for s in stats)
    assert all(sum(s["full_step_reasons"].values()) == s["full_steps"] for s in stats)
    assert "[SpecPV]" not in summary.err
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(json.dumps(line | {"specpv_retrieval_blocks": 0}) for line in lines))
    whole = command("run", specpv_engine, "--prompts", own, "--json", "--max-new-tokens", "3")
    reasons = [r["stats"]["specpv"]["full_step_reasons"].keys() for r in whole.records]
    assert all(keys <= {"switched off"} for keys in reasons)
    debugged = command(*arguments, "--debug")
    logged = [line for line in debugged.err.splitlines() if line.startswith("[SpecPV] fallback: ")]
    assert any("no view yet (prompt '0'" in line for line in logged) and len(logged) == 3
    refused = command(*arguments, "--specpv-retrieval-blocks", "13")
    assert refused.code == 2 and "retrieves 0 to 12" in refused.err
    refused = command(*arguments, "--specpv-retrieval-blocks", "many")
    assert refused.code == 2 and "expected a number of blocks or 'auto'" in refused.err
    assert "lossy: above 24 tokens of context" in command("inspect", specpv_engine).out.replace(
        "\n", " "
    )
    arguments = (
        "bench",
        "pairs",
        specpv_engine,
        "--prompts",
        file,
        "--rounds",
        "1",
        "--max-new-tokens",
        "40",
    )
    table = command(*arguments).out.replace("\n", " ")
    assert "SpecPV (lossy)" in table
    pairs = json.loads(command(*arguments, "--json").out)["sets"][0]["pairs"]
    assert all(pair["specpv"]["partial_steps"] > 0 for pair in pairs)
    manifest = json.loads(command("inspect", specpv_engine, "--json").out)
    assert manifest["specpv"]["n_spec_tokens_buf"] == 40
    assert manifest["options"]["specpv_block_size"] == 8
    build_options = ["--max-seq-len", 192, "--page-size", 4, "--specpv"]
    wrong = command(
        "build", "--model", checkpoints / "t", "--output", tmp_path / "e", *build_options,
        "--specpv-block-size", 6,
    )  # fmt: skip
    assert wrong.code == 2 and "no multiple of the page size 4" in wrong.err


@pytest.mark.parametrize("threads", [None, *slow(1)])
def test_the_decoding_benchmark_runs(
    specpv_engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    threads: int | None,
) -> None:
    """An engine for GPUs rejects ``threads``, so the setting is passed only if it is requested."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("specpv_decoding")
    passed_threads: list[int | None] = []

    class Loaded(Engine):
        @classmethod
        def load(cls, path: Any, settings: Any = None, **rest: Any) -> Engine:
            passed_threads.append(settings.threads)
            return Engine.load(path, settings, **rest)

    def run(**changes: Any) -> list[dict[str, Any]]:
        options = {"contexts": "30 100", "budgets": "0 2", "prompts": 2, "batch": 2, "tokens": 48}
        options |= {"ids": tmp_path / "ids.npy", "output": tmp_path / "rows.json"}
        options |= changes if threads is None else {**changes, "threads": threads}
        arguments = [part for k, v in options.items() for part in (f"--{k}", *str(v).split())]
        monkeypatch.setattr(sys, "argv", ["specpv_decoding.py", str(specpv_engine), *arguments])
        script.main()
        measured: list[dict[str, Any]] = json.loads((tmp_path / "rows.json").read_text())
        return measured

    monkeypatch.setattr(script, "Engine", Loaded)
    np.save(tmp_path / "ids.npy", np.random.default_rng(3).integers(3, 270, 140))
    rows = run()
    assert passed_threads == [threads]
    assert [(row["context"], row["budget"]) for row in rows] == [
        (30, 0),
        (30, 2),
        (100, 0),
        (100, 2),
    ]
    assert all(row["batch"] == 2 and row["tokens_per_s"] > 0 for row in rows)
    assert rows[2]["partial_steps"] == 0 < rows[3]["partial_steps"]
    for wrong, message in {
        ("batch", 4): "the engine takes 3",
        ("budgets", 13): "retrieves 0 to 12",
        ("contexts", 160): "up to 192",
        ("contexts", 143): "has 140 tokens",
    }.items():
        with pytest.raises(SystemExit):
            run(prompts=4, **dict([wrong]))
        assert message in capsys.readouterr().err
