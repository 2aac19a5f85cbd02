"""compute-sanitizer for kernels at small shapes: a sample, and every entry in `make sanitize`.

The logs are in out/sanitizer/.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sanitized_run import TIME_IS_UP
from sanitized_work import write_work
from sanitizer_reports import reported, unexplained

SECONDS = 180
# For starting up, and for a long last piece.
SPARE_SECONDS = 60
# Parallel processes.
SHARDS = min(8, os.cpu_count() or 1)
# `make test-gpu` checks every SAMPLE-th piece, `make sanitize` all.
SAMPLE = 24
FOUND = 99
LOGS = Path(__file__).parents[2] / "out" / "sanitizer"
TOOLS = {
    "memcheck": (),
    "racecheck": ("--racecheck-report", "analysis", "--print-limit", "1000"),
    "synccheck": (),
}
# Pieces that a tool does not run because its false report ends the process. Two warpgroups of
# absorbed attention meet at a named barrier from different branches, which PTX allows. (The next
# launch, project_absorbed, runs under the other tools only.)
LEFT_OUT = {"synccheck": ("attend_absorbed",)}
_TOOLKIT = "/usr/local/cuda/bin"


@pytest.fixture(scope="module")
def sanitizer() -> str:
    path = os.pathsep.join((os.environ.get("PATH", ""), _TOOLKIT))
    result = shutil.which("compute-sanitizer", path=path)
    if result is None:
        pytest.skip(f"compute-sanitizer is neither in PATH nor in {_TOOLKIT}")
    return result


@pytest.fixture(scope="module")
def work(sanitizer: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pieces that are compiled once for all tools."""
    file = tmp_path_factory.mktemp("sanitized") / "work"
    for refusal in write_work(file):
        print(f"left out: {refusal}")
    return file


def watched(commands: list[tuple[list[str], Path]]) -> list[int]:
    """Run commands in parallel with output to their logs; return their exit codes in time."""
    ends_s = time.monotonic() + SECONDS + SPARE_SECONDS
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command, log in commands:
            with log.open("wb") as output:
                running.append(
                    subprocess.Popen(
                        command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
        return [code_in_time(process, ends_s) for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def code_in_time(process: subprocess.Popen[bytes], ends_s: float) -> int:
    try:
        return process.wait(max(0.0, ends_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return TIME_IS_UP


@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_reports_nothing_in_a_sample(sanitizer: str, work: Path, tool: str) -> None:
    """Check one piece of SAMPLE, in one process."""
    check_shards(sanitizer, work, tool, range(1), SAMPLE)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 4 * SPARE_SECONDS)
@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_reports_nothing(sanitizer: str, work: Path, tool: str) -> None:
    check_shards(sanitizer, work, tool, range(SHARDS), SHARDS)


def check_shards(sanitizer: str, work: Path, tool: str, chosen: range, shards: int) -> None:
    """Run the selected shards in parallel; fail on unexplained reports."""
    LOGS.mkdir(parents=True, exist_ok=True)
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all"]
    watching = [sanitizer, *options, *TOOLS[tool]]
    script = Path(__file__).with_name("sanitized_run.py")
    run = [sys.executable, str(script), str(work), str(SECONDS)]
    logs = [LOGS / f"{tool}-{shard}-of-{shards}.log" for shard in chosen]
    codes = watched(
        [
            ([*watching, *run, str(shard), str(shards), *LEFT_OUT.get(tool, ())], log)
            for shard, log in zip(chosen, logs, strict=True)
        ]
    )
    for code, log in zip(codes, logs, strict=True):
        text = log.read_text(encoding="utf-8", errors="replace")
        if "Device not supported" in text:
            pytest.skip("compute-sanitizer does not support this device, see " + str(log))
        last = "\n".join(text.splitlines()[-60:])
        print(last)
        assert code != TIME_IS_UP, f"{tool} did not come through in {SECONDS} s:\n{last}"
        assert code in (0, FOUND), f"{tool} ended with exit code {code}, see {log}:\n{last}"
        assert re.search(r"^all \d+ pieces ran$", text, re.MULTILINE), last
        result = unexplained(tool, text)
        assert not result, f"{tool} found something, see {log}: {sorted(result)}"
        if code == 0:
            assert re.search(r"SUMMARY: 0 (errors|hazards)", text), last
        else:
            assert any(reported(text)), f"{tool} found what no report names, see {log}:\n{last}"
