"""The output of ``tune``, and options that it rejects before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbuild.builder.backends.cuda.tactics.tactic_book import TacticsReport
from specbuild.builder.backends.cuda.tuning.choice import Dropped, TunedShape
from specbuild.builder.backends.cuda.tuning.tune import TuneReport
from specbuild.cli.commands.tune import tune_table
from specbuild.cli.main import main
from specbuild.cli.terminal.console import plain_console


def test_the_table_shows_gains_and_unmeasured_ops(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import sys

    shapes = (
        TunedShape("Linear", "decode", 4, 3, {"loads": 12}, 4.5, 6.0),
        TunedShape("Linear", "decode", 8, 3, {}, 7.0, 7.0),
        TunedShape(
            "RmsMoe", "prefill", 64, 2, {}, 30.0, 30.0, (Dropped({"columns": 32}, "fails"),)
        ),
        TunedShape("RmsMoe", "decode", 4, 7, {}, 20.0, 20.0),
    )
    used = TacticsReport("h200.json", "NVIDIA H200", 9, 3, 120, 40)
    report = TuneReport("NVIDIA H200", "h200.json", 9, shapes, 6, used, 12.4)
    plain_console(sys.stdout).print(tune_table(report))
    text = capsys.readouterr().out
    for fact in (
        "4 of 9 shapes", "6 shapes; give more", "1 of 2 faster: 4 rows 6.0 → 4.5 µs",
        "0 of 2 faster", "40 of 120 launches", "12 s",
        "RmsMoe, prefill, 64 rows, {'columns': 32}: fails",
    ):  # fmt: skip
        assert fact in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "none"], "none is not an engine"),
        (["build", "--model", "m", "--output", "o", "--tactics", "t"], "--tactics t needs"),
        (["build", "--model", "m", "--output", "o", "--tuned-only"], "--tuned-only needs"),
        (
            ["build", "--model", "m", "--output", "o", "--backend", "cuda", "--tactics", "t.json"],
            "t.json cannot be read",
        ),
        (
            ["synth", "--geometry", "tiny", "--output", "o", "--tuned-only"],
            "--tuned-only is about an engine",
        ),
    ],
)
def test_reports_invalid_tune_options_in_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
