"""Progress in a log: a line for each stage, and lines with the elapsed time during a stage."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from specbuild.cli.terminal import heartbeat
from specbuild.cli.terminal.heartbeat import Heartbeat, seconds_text
from specbuild.cli.terminal.progress_bar import ProgressBar


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (75, "1 min 15 s"), (7260, "2 h 1 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def wait_for(console: io.StringIO, pattern: str) -> None:
    end = time.monotonic() + 60
    while not re.search(pattern, console.getvalue()):
        assert time.monotonic() < end, console.getvalue()
        time.sleep(0.01)


def test_a_log_has_a_line_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_SOON_S", 0.05)
    written = io.StringIO()
    with ProgressBar(Console(file=written, width=200)) as progress:
        wait_for(written, "starting: 0 s")
        progress.start("compiling kernels", 40, "source")
        wait_for(written, r"compiling kernels: 40 sources\ncompiling kernels: 0 sources of 40 so")
        progress.advance(4)
        # A tenth is done, so the remaining time is nine times the elapsed time.
        wait_for(written, r"4 sources of 40 sources, [2-9] s, about [12]\d s left")
        progress.advance(36)
    assert "40 sources of 40 sources, 0 s, about" not in written.getvalue()
    lines = written.getvalue()
    time.sleep(0.2)
    assert written.getvalue() == lines, "nothing is written after the end"


def test_the_count_restarts_with_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_SOON_S", 0.05)
    passed: list[float] = []
    with Heartbeat(lambda passed_s: passed.append(passed_s) or "line", lambda _: None) as beat:
        while len(passed) < 3:
            time.sleep(0.01)
        beat.restart()
        before = len(passed)
        while len(passed) < before + 2:
            time.sleep(0.01)
    assert passed[-1] < passed[before - 1] + 1
    assert min(passed[before:]) < passed[before - 1]
