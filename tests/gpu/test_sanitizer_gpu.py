"""compute-sanitizer over every kernel entry at small shapes; `make sanitize` runs just this.

The logs go to out/sanitizer/.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sanitized_run import TIME_IS_UP
from sanitized_work import write_work

SECONDS = 180
# For starting up, and for a last piece that takes long.
SPARE_SECONDS = 60
FOUND = 99
LOGS = Path(__file__).parents[2] / "out" / "sanitizer"
TOOLS = {
    "memcheck": (),
    "racecheck": ("--racecheck-report", "all"),
    "synccheck": (),
}
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


def watched(command: list[str], log: Path) -> int:
    """The command's exit code, its output in ``log``; it and its children end in time."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(SECONDS + SPARE_SECONDS)
        except subprocess.TimeoutExpired:
            return TIME_IS_UP
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 4 * SPARE_SECONDS)
@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_finds_nothing(sanitizer: str, work: Path, tool: str) -> None:
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{tool}.log"
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all"]
    script = Path(__file__).with_name("sanitized_run.py")
    run = [sys.executable, str(script), str(work), str(SECONDS)]
    code = watched([sanitizer, *options, *TOOLS[tool], *run], log)
    said = log.read_text(encoding="utf-8", errors="replace")
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not support this device, see " + str(log))
    last = "\n".join(said.splitlines()[-60:])
    print(last)
    assert code != TIME_IS_UP, f"{tool} did not come through in {SECONDS} s:\n{last}"
    assert code == 0, f"{tool} found something (exit code {code}), see {log}:\n{last}"
    assert re.search(r"SUMMARY: 0 (errors|hazards)", said), last
