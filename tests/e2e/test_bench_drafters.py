"""``bench drafters``: every drafter of an engine in one table, and rejected options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Command

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, text_target: Path, text_draft: Path) -> Path:
    output = tmp_path_factory.mktemp("drafters") / "engine"
    options = BuildOptions.from_flat(
        model=text_target,
        draft=text_draft,
        output=output,
        drafter="suffix",
        max_seq_len=64,
        max_batch_size=2,
        suffix_max_tokens=6,
    )
    build(options, SilentProgress())
    return output


def test_prints_a_row_for_each_batch_context_and_drafter(
    command: Command, engine: Path, tmp_path: Path
) -> None:
    plot = tmp_path / "drafters.svg"
    arguments = ("bench", "drafters", engine, "--max-new-tokens", 12, "--rounds", 1, "--plot", plot)
    result = command(*arguments, "--context", 8, "--context", 24, "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    names = ["none", "eagle3", "suffix", "auto"]
    places = [(row["batch"], row["context"], row["drafter"]) for row in report["rows"]]
    assert places == [(b, c, n) for b in (1, 2) for c in (8, 24) for n in names]
    undrafted = []
    for row in report["rows"]:
        assert row["same_output"] and row["tokens_per_s"] > 0 and row["tokens_per_step"] >= 1
        assert row["verify_s"] > 0 and row["draft_s"] >= 0
        if row["drafter"] == "none":
            assert (row["ratio"], row["tokens_per_step"]) == (1, 1)
            undrafted.append(row["draft_s"] / row["verify_s"])
    # A busy machine can interrupt one row, so the least of the four is compared.
    assert min(undrafted) < 0.1
    assert "<svg" in plot.read_text()
    table = command(*arguments[:-2], "--batch", 1, "--context", 8)
    # A table of 80 columns wraps its headings.
    assert table.code == 0 and {"draft", "verify", "ratio"} <= set(table.out.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--drafter", "suffix"), "No such option"),
        (("--batch", 9), "--batch 9 is more than the engine's 2 sequences"),
        (("--context", 60), "--context 60 and --max-new-tokens 12 are more than"),
    ],
)
def test_reports_unsupported_options_in_one_line(
    command: Command, engine: Path, options: tuple[object, ...], words: str
) -> None:
    result = command("bench", "drafters", engine, "--max-new-tokens", 12, *options)
    assert result.code == 2 and words in " ".join(result.err.split()), result.err
