"""``--help`` at 80 columns, and the conversion of options into their groups."""

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
    visible_words = {word for line in lines for word in line.split() if line.startswith("│")}
    options = {flag for entry in command.params for flag in (*entry.opts, *entry.secondary_opts)}
    assert {flag for flag in options if flag.startswith("--")} <= visible_words
    assert sum(line.strip().startswith(f"specbuild {name} ") for line in lines) <= 3
    assert [line for line in lines if line.startswith("│")][-1].split()[1] == "--help"


@pytest.mark.parametrize(("name", "command"), every_command(), ids=[n for n, _ in every_command()])
def test_paragraphs_of_help_fill_their_lines(
    name: str, command: typer.core.TyperCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line ends where the first word of the next one would exceed 80 columns."""
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
        "Weights and kernels",
        "CPU",
        "TensorRT",
        "SpecPV (lossy)",
        "DSA (lossy)",
        "Files and debugging",
        "General",
    ]


def read_line(kind: type[Group], line: str) -> Group:
    """Return the argument of a command with this group of options."""
    received: list[Group] = []

    def command(group: Group) -> None:
        received.append(group)

    command.__annotations__["group"] = kind
    app = typer.Typer()
    app.command()(takes_options(command))
    typer.main.get_command(app)(shlex.split(line), standalone_mode=False)
    return received[0]


def test_options_are_converted_into_their_groups() -> None:
    group = read_line(
        BuildOptions,
        "--model m --output o --draft d --max-seq-len 64 --draft-top-k 2 --tuned-only "
        "--timing-cache c --specpv --specpv-n-sink-blocks 3 --no-dsa --dsa-min-agreement 0.5 "
        "--force",
    )
    assert (group.model, group.output, group.draft) == (Path("m"), Path("o"), (Path("d"),))
    assert (group.limits.max_seq_len, group.limits.page_size) == (64, None)
    assert (group.drafting.top_k, group.drafting.depth) == (2, None)
    assert group.kernels.tuned_only and str(group.tensorrt.timing_cache) == "c"
    assert (group.specpv.enabled, group.specpv.n_sink_blocks) == (True, 3)
    assert (group.dsa.enabled, group.dsa.min_agreement) == (False, 0.5)
    assert group.force and not group.strict
    recorded = group.recorded()
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


def test_rejects_an_unknown_flat_name() -> None:
    with pytest.raises(TypeError, match="BuildOptions has no option block_size"):
        BuildOptions.from_flat(model="m", output="o", block_size=3)


def test_the_error_names_the_option_out_of_bounds() -> None:
    group = BuildOptions.from_flat(model="m", output="o", draft_depth=0)
    with pytest.raises(SpecbuildError, match=r"--draft-depth is 0; it must be at least 1"):
        group.drafting.check_bounds(group.drafting.given())


REQUIRED = "--model m --output o --text a --text b"


def test_converts_lists_numbers_and_losses() -> None:
    losses = "--loss logits-kl --loss hidden-mse=0.5 --hidden-layers 1,11"
    group = read_line(IndexerTraining, f"{REQUIRED} {losses} --top-k 8,16 --no-mla --micro-batch 2")
    assert group.texts == (Path("a"), Path("b"))
    assert group.losses == (("logits-kl", 1.0), ("hidden-mse", 0.5))
    assert (group.hidden_layers, group.top_k) == ((1, 11), (8, 16))
    assert (group.mla, group.micro_batch_size) == (False, 2)


def test_omitted_options_have_the_default_of_the_field() -> None:
    group = read_line(IndexerTraining, REQUIRED)
    assert group == IndexerTraining(model=Path("m"), output=Path("o"), texts=group.texts)
    assert (group.learning_rate, group.losses, group.mla) == (1e-3, (("attention-kl", 1.0),), True)
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
def test_the_error_names_the_option_of_an_invalid_value(line: str, message: str) -> None:
    with pytest.raises(SpecbuildError, match=message):
        read_line(IndexerTraining, f"{REQUIRED} '{line.replace(' ', chr(39) + ' ' + chr(39))}'")


@pytest.mark.parametrize(("text", "blocks"), [("auto", "auto"), ("12", 12)])
def test_blocks_are_a_number_or_auto(text: str, blocks: object) -> None:
    group = read_line(SpecPvRequest, f"--specpv-retrieval-blocks {text}")
    assert group.retrieval_blocks == blocks
    assert read_line(SpecPvRequest, "").retrieval_blocks is None
