"""What ``--help`` shows at 80 columns, and that options are read into the groups they belong to."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest
import typer.main
from typer.testing import CliRunner

from specbuild.builder.options import BuildOptions
from specbuild.cli.main import command_line
from specbuild.cli.options.derived import takes_options
from specbuild.runtime.errors import SpecbuildError

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
    assert sum(line.strip().startswith("specbuild ") for line in lines) <= 3
    assert [line for line in lines if line.startswith("│")][-1].split()[1] == "--help"


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
        "CUDA kernels",
        "TensorRT",
        "SpecPV (lossy)",
        "DSA (lossy)",
        "Files and debugging",
        "General",
    ]


def test_options_are_read_into_their_groups() -> None:
    seen: list[BuildOptions] = []

    @takes_options
    def build(asked: BuildOptions) -> None:
        seen.append(asked)

    app = typer.Typer()
    app.command()(build)
    line = (
        "--model m --output o --draft d --max-seq-len 64 --draft-top-k 2 --tuned-only "
        "--timing-cache c --specpv --specpv-n-sink-blocks 3 --no-dsa --dsa-min-agreement 0.5 "
        "--force"
    )
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == 0, result.output
    (asked,) = seen
    assert (str(asked.model), str(asked.output), str(asked.draft)) == ("m", "o", "d")
    assert (asked.limits.max_seq_len, asked.limits.page_size) == (64, None)
    assert (asked.drafting.top_k, asked.drafting.depth) == (2, None)
    assert asked.kernels.tuned_only and str(asked.tensorrt.timing_cache) == "c"
    assert (asked.specpv.enabled, asked.specpv.n_sink_blocks) == (True, 3)
    assert (asked.dsa.enabled, asked.dsa.min_agreement) == (False, 0.5)
    assert asked.force and not asked.strict
    recorded = asked.recorded()
    assert recorded["specpv_n_sink_blocks"] == 3 and recorded["draft_top_k"] == 2
    assert not recorded.keys() & {"model", "output", "draft", "force", "tuned_only", "backend"}


def test_an_unknown_flat_name_is_refused() -> None:
    with pytest.raises(TypeError, match="BuildOptions has no option block_size"):
        BuildOptions.from_flat(model="m", output="o", block_size=3)


def test_bounds_name_the_option() -> None:
    asked = BuildOptions.from_flat(model="m", output="o", draft_depth=0)
    with pytest.raises(SpecbuildError, match=r"--draft-depth is 0; it must be at least 1"):
        asked.drafting.check_bounds(asked.drafting.given())
