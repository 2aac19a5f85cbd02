"""Engines with suffix decoding: without weights or with a draft, lossless; rejected options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import Command

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.verify import verify_engine
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

IDS = (4, 9, 2, 7) * 5


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, text_target: Path, text_draft: Path
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("suffix")
    for name, draft in (("alone", None), ("beside", text_draft)):
        options = BuildOptions.from_flat(
            model=text_target,
            draft=draft,
            output=folder / name,
            drafter="suffix",
            max_seq_len=128,
            suffix_max_tokens=10,
            suffix_min_token_prob=0.0,
        )
        build(options, SilentProgress())
    return {name: folder / name for name in ("alone", "beside")}


def decoded(engine: Engine, temperature: float, **options: object) -> list[tuple[int, ...]]:
    sampling = SamplingParams(temperature, seed=5)
    params = GenerateParams(48, sampling, ignore_eos=True)
    prompts = [Prompt(str(i), prompt_ids=IDS[i:]) for i in range(3)]
    outputs = {}
    for event in engine.generate(prompts, params, **options):  # type: ignore[arg-type]
        if isinstance(event, FinishEvent):
            outputs[event.request] = event.record.output_ids
    return [outputs[i] for i in range(3)]


@pytest.mark.parametrize("name", ["alone", "beside"])
def test_suffix_decoding_changes_no_token_of_an_engine(engines: dict[str, Path], name: str) -> None:
    engine = Engine.load(engines[name])
    for temperature in (0.0, 0.8):
        plain = decoded(engine, temperature, speculation=None)
        chains = dict(speculation=DraftShape(1, 10, 10), drafter="suffix")
        for options in (chains, dict(drafter="suffix"), dict(drafter="auto"), chains):
            assert decoded(engine, temperature, **options) == plain
    assert engine.decoder.host_statistics["suffix"].kept_tokens > 0


def test_verify_runs_with_suffix_proposals(engines: dict[str, Path], text_target: Path) -> None:
    report = verify_engine(engines["alone"], text_target, None, SilentProgress())
    assert report.passed
    assert [row.name for row in report.losslessness] == [
        "greedy: without draft = transformers",
        *(f"{how}: chain of {n} = without draft" for how in ("greedy", "sampled") for n in (4, 10)),
    ]


def test_the_manifest_lists_the_drafters(engines: dict[str, Path], command: Command) -> None:
    alone, beside = (read_manifest(engines[name]) for name in ("alone", "beside"))
    assert [d.kind for d in alone.drafters] == ["suffix"] and alone.draft is None
    assert [d.kind for d in beside.drafters] == ["eagle3", "suffix"] and beside.draft is not None
    assert set(alone.roles) == {"target", "choose", "accept", "commit"}
    assert alone.draft_default == DraftShape(1, 10, 10)
    assert "suffix" in alone.features and alone.drafters[0].max_tokens == 10
    result = command("inspect", engines["alone"])
    assert result.code == 0 and "drafter: suffix" in result.out and "up to 10 tokens" in result.out
    result = command("run", engines["beside"], "--prompt", "ab", "--drafter", "suffix", "--json")
    assert result.code == 0, result.err


def test_synthetic_engines_support_suffix_decoding(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "engine"
    words = ("--geometry", "tiny", "--layers", "1", "--drafter", "suffix")
    result = command("synth", *words, "--suffix-max-tokens", "6", "--engine", path)
    assert result.code == 0, result.err
    [drafter] = read_manifest(path).drafters
    assert (drafter.kind, drafter.max_tokens) == ("suffix", 6)
    engine = Engine.load(path)

    def record_of(ids: tuple[int, ...], **options: Any) -> RunRecord:
        params = GenerateParams(12, ignore_eos=True)
        *_, last = engine.generate([Prompt("0", prompt_ids=ids)], params, **options)
        assert isinstance(last, FinishEvent)
        return last.record

    # A token is determined by the one before it, so the prompt's continuation repeats.
    generated = record_of((5,), speculation=None).output_ids
    again = record_of((5, *generated, 5), drafter="suffix")
    assert again.output_ids == generated
    assert again.stats.steps <= 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--suffix-max-tokens", "4"), "is of suffix decoding; add --drafter suffix"),
        (("--drafter", "suffix", "--suffix-min-token-prob", "1.5"), "--suffix-min-token-prob"),
        (("--drafter", "suffix", "--suffix-max-tokens", "500"), "--suffix-max-tokens"),
        (
            ("--drafter", "suffix", "--max-seq-len", "8", "--suffix-max-tokens", "9"),
            "ask for fewer --draft-tokens or --suffix-max-tokens",
        ),
        (("--drafter", "suffix", "--draft-depth", "3"), "needs a draft"),
    ],
)
def test_reports_invalid_options_in_one_line(
    command: Command, text_target: Path, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    output = tmp_path / "engine"
    result = command("build", "--model", text_target, "--output", output, *options)
    assert result.code == 2 and words in " ".join(result.err.split()), result.err
    assert not output.exists()


def test_run_selects_a_drafter_of_the_engine(command: Command, engines: dict[str, Path]) -> None:
    arguments = ("run", engines["alone"], "--prompt", "ab")
    result = command(*arguments, "--drafter", "eagle3")
    assert result.code == 2 and "the engine has suffix" in " ".join(result.err.split())
    result = command(*arguments, "--draft-top-k", "2")
    assert result.code == 2
