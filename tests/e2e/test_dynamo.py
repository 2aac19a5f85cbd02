"""Two workers of the example behind Dynamo's front end and router, on loopback."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command_line import Command

from specbuild.runtime.engine import Engine
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

TARGET = Path(__file__).parents[2] / "examples" / "tiny-gpt-oss" / "target"
TEXT = (Path(__file__).parents[2] / "runtime" / "decode" / "loop.py").read_text()
needs_dynamo = pytest.mark.skipif(
    find_spec("dynamo") is None,
    reason="there is no Dynamo: pip install --no-deps ai-dynamo ai-dynamo-runtime",
)


def started(folder: Path, name: str, *words: object) -> subprocess.Popen[str]:
    """Start a process that logs to ``name.log``."""
    environment = os.environ | {"DYN_FILE_KV": str(folder / "kv"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, words)],
        stdout=(folder / f"{name}.log").open("w"),
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


@pytest.fixture
def folder(example_engine: Path, tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A folder with the logs of two workers and a front end, and the front end's port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker = ("specbuild.cli.main", "dynamo", example_engine, "--model", TARGET,
              "--served-model-name", "tiny", "--discovery-backend", "file")  # fmt: skip
    router = ("dynamo.frontend", "--router-mode", "kv", "--discovery-backend", "file",
              "--http-port", port)  # fmt: skip
    with ExitStack() as running:
        for name, words in (("w0", worker), ("w1", worker), ("front", router)):
            process = running.enter_context(started(tmp_path, name, *words))
            running.callback(process.terminate)
        yield tmp_path, port


def ask(port: int, prompt: str, **fields: object) -> dict[str, Any]:
    """Return the completion of a prompt."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0} | fields
    http_request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(http_request, timeout=120) as answer:
        completion: dict[str, Any] = json.load(answer)
        return completion


def served(folder: Path) -> list[int]:
    """Return how many requests each worker has received."""
    logs = [(folder / f"w{i}.log").read_text(errors="replace") for i in (0, 1)]
    return [len(re.findall("request received", log)) for log in logs]


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_dynamo
def test_prompts_with_a_shared_prefix_use_one_worker(
    folder: tuple[Path, int], example_engine: Path
) -> None:
    path, port = folder
    deadline_s = time.monotonic() + 240
    while True:
        try:
            ask(port, "a")
            break
        except (OSError, urllib.error.HTTPError):
            assert time.monotonic() < deadline_s, (path / "front.log").read_text()[-2000:]
            time.sleep(1)
    engine = Engine.load(example_engine)
    for begins in (TEXT[:1500], TEXT[1500:3000], TEXT[3000:4500]):
        requests_per_worker = []
        for end in ("\n", "\n\n", "# 3"):
            before = served(path)
            answer = ask(port, begins + end)
            prompt = Prompt("own", prompt=begins + end)
            params = GenerateParams(max_new_tokens=12, raw=True)
            (own,) = [e for e in engine.generate(prompt, params) if isinstance(e, FinishEvent)]
            assert answer["choices"][0]["text"] == own.record.text
            assert answer["usage"]["prompt_tokens"] == len(own.record.prompt_ids)
            # The router has received the events of the cached pages.
            time.sleep(1)
            requests_per_worker.append(
                [after - earlier for after, earlier in zip(served(path), before, strict=True)]
            )
        workers = {counts.index(max(counts)) for counts in requests_per_worker}
        assert len(workers) == 1, requests_per_worker


def test_a_worker_reports_missing_packages(
    command: Command, tiny_engine: Path, tmp_path: Path
) -> None:
    assert command("dynamo", tiny_engine, "--model", tmp_path).refused("no config.json")
    (tmp_path / "config.json").write_text("{}")
    if find_spec("dynamo") is None:
        result = command("dynamo", tiny_engine, "--model", tmp_path)
        assert result.refused("specbuild dynamo needs dynamo")
    assert command("dynamo", tmp_path, "--model", TARGET).refused("manifest.json")
