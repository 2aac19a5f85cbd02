"""Decoding writes nothing under the home directory, and loads nothing that could call home."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RUN = """
import os, sys
from specbuild.cli.main import main
assert main(["run", sys.argv[1], "--prompt", "ab", "--max-new-tokens", "2", "--json"]) == 0
print(os.environ["ORT_DISABLE_TELEMETRY"], *sys.modules, file=sys.stderr)
"""
CALLERS = {"huggingface_hub", "hf_xet", "httpx", "httpx2", "requests", "urllib3", "aiohttp"}


def run_at_home(engine: Path, home: Path, **variables: str) -> list[str]:
    """The switch of telemetry, and all modules of a process that decoded with ``HOME=home``."""
    home.mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ORT_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(engine)],
        env=kept | {"HOME": str(home), "SPECBUILD_CACHE_DIR": str(home.parent)} | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stderr.splitlines()[-1].split()


def test_a_run_sends_and_leaves_nothing(tiny_engine: Path, tmp_path: Path) -> None:
    switch, *modules = run_at_home(tiny_engine, tmp_path / "home")
    assert switch == "1"
    assert {"onnxruntime", "tokenizers", "jinja2"} <= set(modules)
    assert not CALLERS & set(modules)
    assert not list((tmp_path / "home").iterdir())


def test_the_switch_is_the_users(tiny_engine: Path, tmp_path: Path) -> None:
    assert run_at_home(tiny_engine, tmp_path / "home", ORT_DISABLE_TELEMETRY="0")[0] == "0"
