"""The longest test files start first, in the same order in every worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from file_times import LONGEST, expected_s

TESTS = Path(__file__).parents[1]
CONFTEST = """
import sys
sys.path.insert(0, {tests!r})
import file_times
def pytest_configure(config):
    config.pluginmanager.register(file_times.FileTimes(config))
"""
LOG = "open('log', 'a').write(__file__[-4:-3])"
WORK = "t = time.process_time()\n    while time.process_time() < t + {}: pass"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of files a, b and c with little, much and some work; each has two tests."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST.format(tests=str(TESTS)))
    for name, seconds in {"a": 0.05, "b": 0.6, "c": 0.25}.items():
        work = f"    {LOG}\n    {WORK.format(seconds)}\n"
        text = f"import time\ndef test_2():\n{work}\ndef test_1(): {LOG}\n"
        (tmp_path / f"test_{name}.py").write_text(text)
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[str, dict[str, float]]:
    """Return the files of the tests in the order in which they ran, and the stored times."""
    (folder / "log").write_text("")
    environment = {**os.environ, "SPECBUILD_TEST_STORE": str(folder / "store")}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    subprocess.run(words, cwd=folder, env=environment, check=True, timeout=300)
    times_file = folder / "store" / "file-times.json"
    times = json.loads(times_file.read_text()) if times_file.exists() else {}
    return (folder / "log").read_text(), times


def test_the_longest_file_starts_first(folder: Path) -> None:
    pytest.importorskip("xdist")
    distributed = ("-n", "1", "--dist", "loadfile", "--no-loadscope-reorder")
    _, times = run(folder, *distributed)
    assert times["test_b.py"] >= 0.5, "its loop of 0.6 s counts"
    # The resolution of the clock on a busy machine may make two short files equal.
    seconds_by_file = {"test_a.py": 1.0, "test_b.py": 3.0, "test_c.py": 2.0}
    (folder / "store" / "file-times.json").write_text(json.dumps(seconds_by_file))
    order, again = run(folder, *distributed)
    assert order == "bbccaa"
    (folder / "test_b.py").write_text("def test_nothing(): pass\n")
    (folder / "test_a.py").unlink()
    _, later = run(folder, *distributed)
    assert later["test_b.py"] >= again["test_b.py"], "the longest time is kept"
    assert "test_a.py" not in later


def test_one_process_runs_in_order_and_stores_no_times(folder: Path) -> None:
    assert run(folder) == ("aabbcc", {})


def test_files_without_a_time_are_ordered_by_a_list_or_by_size(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text("1")
    (tmp_path / "large.py").write_text("1" * 100)
    names = ["small.py", "large.py", "known.py", *reversed(LONGEST)]
    ordered = sorted(names, key=lambda name: -expected_s(name, {"known.py": 500.0}, tmp_path))
    assert ordered == [*LONGEST, "known.py", "large.py", "small.py"]
    assert all((TESTS.parent / name).is_file() for name in LONGEST)
