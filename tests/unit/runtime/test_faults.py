"""Kills, signals, failing calls and full disks: an output is the old one, the new one or none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from content_store import content_store
from engine_directory import write_engine
from faults.interposition import COMPILER
from faults.scenarios import SCENARIOS, write_key

TESTS = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler, cc")


def tried(*arguments: object) -> None:
    """Inject faults into a process with a library loaded before the C library."""
    words = (sys.executable, "-m", "faults", "--exports", content_store().folder, *arguments)
    done = subprocess.run(
        [str(word) for word in words],
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_few_faults_leave_nothing_half(tmp_path: Path) -> None:
    write_engine(tmp_path / "engine")
    write_key(tmp_path / "key.pem")
    names = [word for name in ("sign", "rewrite", "train") for word in ("--scenario", name)]
    tried("--inputs", tmp_path, *names, "--every", 4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_fault_leaves_nothing_half(scenario: str) -> None:
    tried("--scenario", scenario)
