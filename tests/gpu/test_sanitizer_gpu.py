"""compute-sanitizer over kernels at small shapes: a sample, and every entry in `make sanitize`.

The logs go to out/sanitizer/.
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
# For starting up, and for a last piece that takes long.
SPARE_SECONDS = 60
# Processes side by side.
SHARDS = min(8, os.cpu_count() or 1)
# `make test-gpu` watches every SAMPLE-th piece, `make sanitize` all.
SAMPLE = 24
FOUND = 99
LOGS = Path(__file__).parents[2] / "out" / "sanitizer"
TOOLS = {
    "memcheck": (),
    "racecheck": ("--racecheck-report", "analysis", "--print-limit", "1000"),
    "synccheck": (),
}
# Pieces that a tool does not run: what it is wrong about ends the process. Two warpgroups of
# absorbed attention meet at a named barrier from branches of their own, which PTX allows. (The
# launch behind, project_absorbed, runs under the other tools only.)
LEFT_OUT = {"synccheck": ("attend_absorbed",)}
_TOOLKIT = "/usr/local/cuda/bin"


@pytest.fixture(scope="module")
def sanitizer() -> str:
    path = os.pathsep.join((os.environ.get("PATH", ""), _TOOLKIT))
    found = shutil.which("compute-sanitizer", path=path)
    if found is None:
        pytest.skip(f"compute-sanitizer is neither in PATH nor in {_TOOLKIT}")
    return found


@pytest.fixture(scope="module")
def work(sanitizer: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled once for all tools."""
    file = tmp_path_factory.mktemp("sanitized") / "work"
    for refusal in write_work(file):
        print(f"left out: {refusal}")
    return file


def watched(commands: list[tuple[list[str], Path]]) -> list[int]:
    """Exit codes of commands side by side, output in their logs; all end in time."""
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
def test_the_sanitizer_finds_nothing_in_a_sample(sanitizer: str, work: Path, tool: str) -> None:
    """One piece of SAMPLE, in one process."""
    check_shards(sanitizer, work, tool, range(1), SAMPLE)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 4 * SPARE_SECONDS)
@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_finds_nothing(sanitizer: str, work: Path, tool: str) -> None:
    check_shards(sanitizer, work, tool, range(SHARDS), SHARDS)


def check_shards(sanitizer: str, work: Path, tool: str, chosen: range, shards: int) -> None:
    """Run the chosen ones of so many shards side by side; fail on what no report explains."""
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
        said = log.read_text(encoding="utf-8", errors="replace")
        if "Device not supported" in said:
            pytest.skip("compute-sanitizer does not support this device, see " + str(log))
        last = "\n".join(said.splitlines()[-60:])
        print(last)
        assert code != TIME_IS_UP, f"{tool} did not come through in {SECONDS} s:\n{last}"
        assert code in (0, FOUND), f"{tool} ended with exit code {code}, see {log}:\n{last}"
        assert re.search(r"^all \d+ pieces ran$", said, re.MULTILINE), last
        found = unexplained(tool, said)
        assert not found, f"{tool} found something, see {log}: {sorted(found)}"
        if code == 0:
            assert re.search(r"SUMMARY: 0 (errors|hazards)", said), last
        else:
            assert any(reported(said)), f"{tool} found what no report names, see {log}:\n{last}"
