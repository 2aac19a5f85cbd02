"""What ``--help`` shows at 80 columns, and that options are read into the groups they belong to."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest
import typer.main
from typer.testing import CliRunner

from specbuild.builder.option_group import OptionGroup
from specbuild.builder.options import BuildOptions
from specbuild.builder.speculative_config import EngineConfig
from specbuild.builder.training.config import TrainOptions
from specbuild.builder.training.heads.options import IndexerTraining
from specbuild.cli.main import command_line, main
from specbuild.cli.options.derived import takes_options
from specbuild.cli.options.lossy import SpecPvRequest
from specbuild.runtime.errors import SpecbuildError

Group = TypeVar("Group", bound=OptionGroup)
COMMANDS = typer.main.get_command(command_line())


def every_command() -> Iterator[tuple[str, typer.core.TyperCommand]]:
    for name, command in COMMANDS.commands.items():
        for sub_name, sub in getattr(command, "commands", {"": command}).items():
            yield f"{name} {sub_name}".strip(), sub


@pytest.mark.parametrize(("name", "command"), every_command(), ids=[n for n, _ in every_command()])
def test_every_option_is_readable_at_80_columns(
    name: str, command: typer.core.TyperCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NO_COLOR", "1")
    result = CliRunner().invoke(command_line(), [*shlex.split(name), "--help"])
    assert result.exit_code == 0, result.output
    assert "…" not in result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    shown = {word for line in lines for word in line.split() if line.startswith("│")}
    options = {flag for entry in command.params for flag in (*entry.opts, *entry.secondary_opts)}
    assert {flag for flag in options if flag.startswith("--")} <= shown
    assert sum(line.strip().startswith(f"specbuild {name} ") for line in lines) <= 3
    assert [line for line in lines if line.startswith("│")][-1].split()[1] == "--help"


@pytest.mark.parametrize(("name", "command"), every_command(), ids=[n for n, _ in every_command()])
def test_paragraphs_of_help_fill_their_lines(
    name: str, command: typer.core.TyperCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line ends where the first word of the next one would not fit into 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NO_COLOR", "1")
    output = CliRunner().invoke(command_line(), [*shlex.split(name), "--help"]).output
    lines = [line.strip() for line in output.partition("Examples:")[0].splitlines()]
    assert command.help is not None
    for line, following in pairwise(lines):
        if line and following:
            assert len(line) + 1 + len(following.split()[0]) > 78, (line, following)


def test_build_help_has_three_examples_and_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output = CliRunner().invoke(command_line("build"), ["build", "--help"]).output
    lines = [line.strip() for line in output.splitlines()]
    assert sum(line.startswith("specbuild build ") for line in lines) == 3
    panels = [line.strip("╭─╮ ") for line in lines if line.startswith("╭")]
    assert panels == [
        "Model",
        "Limits",
        "Draft",
        "Suffix decoding",
        "CUDA kernels",
        "CPU",
        "TensorRT",
        "SpecPV (lossy)",
        "DSA (lossy)",
        "Files and debugging",
        "General",
    ]


def read_line(kind: type[Group], line: str) -> Group:
    """What a command that takes this group is called with."""
    seen: list[Group] = []

    def command(asked: Group) -> None:
        seen.append(asked)

    command.__annotations__["asked"] = kind
    app = typer.Typer()
    app.command()(takes_options(command))
    typer.main.get_command(app)(shlex.split(line), standalone_mode=False)
    return seen[0]


def test_options_are_read_into_their_groups() -> None:
    asked = read_line(
        BuildOptions,
        "--model m --output o --draft d --max-seq-len 64 --draft-top-k 2 --tuned-only "
        "--timing-cache c --specpv --specpv-n-sink-blocks 3 --no-dsa --dsa-min-agreement 0.5 "
        "--force",
    )
    assert (asked.model, asked.output, asked.draft) == (Path("m"), Path("o"), (Path("d"),))
    assert (asked.limits.max_seq_len, asked.limits.page_size) == (64, None)
    assert (asked.drafting.top_k, asked.drafting.depth) == (2, None)
    assert asked.kernels.tuned_only and str(asked.tensorrt.timing_cache) == "c"
    assert (asked.specpv.enabled, asked.specpv.n_sink_blocks) == (True, 3)
    assert (asked.dsa.enabled, asked.dsa.min_agreement) == (False, 0.5)
    assert asked.force and not asked.strict
    recorded = asked.recorded()
    assert recorded["specpv_n_sink_blocks"] == 3 and recorded["draft_top_k"] == 2
    assert not recorded.keys() & {"model", "output", "draft", "force", "tuned_only", "backend"}


def test_a_deprecated_name_sets_the_current_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = BuildOptions.from_flat(model=Path("m"), output=Path("o"), screen_head=True)
    assert options.kernels.prefilter_head
    file = tmp_path / "engine.yaml"
    file.write_text("build:\n  model: m\n  output: o\n  screen-head: true\n")
    assert EngineConfig.from_yaml(file).build_options().kernels.prefilter_head
    words = ["build", "--model", str(tmp_path), "--output", str(tmp_path / "o"), "--screen-head"]
    assert main(words) == 2
    written = capsys.readouterr().err
    assert "warning: --screen-head is deprecated; use --prefilter-head" in written
    assert "--prefilter-head needs --backend cuda" in written


def test_an_unknown_flat_name_is_refused() -> None:
    with pytest.raises(TypeError, match="BuildOptions has no option block_size"):
        BuildOptions.from_flat(model="m", output="o", block_size=3)


def test_bounds_name_the_option() -> None:
    asked = BuildOptions.from_flat(model="m", output="o", draft_depth=0)
    with pytest.raises(SpecbuildError, match=r"--draft-depth is 0; it must be at least 1"):
        asked.drafting.check_bounds(asked.drafting.given())


REQUIRED = "--model m --output o --text a --text b"


def test_lists_numbers_and_losses_are_read() -> None:
    losses = "--loss logits-kl --loss hidden-mse=0.5 --hidden-layers 1,11"
    asked = read_line(IndexerTraining, f"{REQUIRED} {losses} --top-k 8,16 --no-mla --micro-batch 2")
    assert asked.texts == (Path("a"), Path("b"))
    assert asked.losses == (("logits-kl", 1.0), ("hidden-mse", 0.5))
    assert (asked.hidden_layers, asked.top_k) == ((1, 11), (8, 16))
    assert (asked.mla, asked.micro_batch_size) == (False, 2)


def test_what_is_not_given_keeps_the_fields_default() -> None:
    asked = read_line(IndexerTraining, REQUIRED)
    assert asked == IndexerTraining(model=Path("m"), output=Path("o"), texts=asked.texts)
    assert (asked.learning_rate, asked.losses, asked.mla) == (1e-3, (("attention-kl", 1.0),), True)
    draft = read_line(TrainOptions, f"{REQUIRED} --self-text 5 --self-text-temperature 0.5")
    assert (draft.self_text.count, draft.self_text.temperature) == (5, 0.5)
    assert (draft.steps, draft.save_every, draft.aux_layers) == (2000, 500, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--hidden-layers 1;2", "--hidden-layers 1;2 is not a list of numbers"),
        ("--loss logits-kl=x", "^--loss logits-kl=x: 'x' is not a number"),
        ("--joint-loss logits-kl=x", "^--joint-loss logits-kl=x: 'x' is not a number"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_option(line: str, message: str) -> None:
    with pytest.raises(SpecbuildError, match=message):
        read_line(IndexerTraining, f"{REQUIRED} '{line.replace(' ', chr(39) + ' ' + chr(39))}'")


@pytest.mark.parametrize(("text", "blocks"), [("auto", "auto"), ("12", 12)])
def test_blocks_are_a_number_or_auto(text: str, blocks: object) -> None:
    asked = read_line(SpecPvRequest, f"--specpv-retrieval-blocks {text}")
    assert asked.retrieval_blocks == blocks
    assert read_line(SpecPvRequest, "").retrieval_blocks is None
