"""Without a package of an extra, commands work or name the extra that installs it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import without_packages
from left_out import slow

from specbuild.cli.terminal.failures import EXTRA_OF_PACKAGE

ROOT = Path(__file__).parents[2]
# Import names that differ from those of the packages.
IMPORTED = {
    "cuda-bindings": "cuda",
    "fonttools": "fontTools",
    "nvidia-cuda-nvrtc": "nvidia",
    "pillow": "PIL",
    "protobuf": "google",
    "pyzmq": "zmq",
}
# Extras that no command needs: those of developers, and types for tests.
DEVELOPERS = ("dev", "tensorrt-bindings", "tensorrt-lean")


def installed_by_extras() -> dict[str, str]:
    """Return the extra of each package in pyproject.toml, by import name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {}
    for extra, requirements in project["optional-dependencies"].items():
        for requirement in requirements if extra not in DEVELOPERS else ():
            name = re.match(r"[\w-]+", requirement)
            assert name is not None
            package = IMPORTED.get(name[0], name[0].replace("-", "_"))
            extras[package] = extra
    return extras


def test_every_package_belongs_to_an_extra() -> None:
    assert installed_by_extras() == EXTRA_OF_PACKAGE


@pytest.fixture(scope="module")
def used_port() -> Iterator[int]:
    """A port in use, so that a server ends when it starts."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


CASES = ["pydantic", "uvloop", "llguidance", "onnxruntime", "torch"]


@pytest.mark.parametrize(
    "package", [*CASES, *slow(*(name for name in EXTRA_OF_PACKAGE if name not in CASES))]
)
def test_commands_without_a_package(
    tmp_path: Path, tiny_engine: Path, text_target: Path, used_port: int, package: str
) -> None:
    extra = EXTRA_OF_PACKAGE[package]
    engine, bench = str(tiny_engine), ["--rounds", "1", "--max-new-tokens", "4"]
    commands = [
        ["doctor"],
        ["--help"],
        ["serve", "--help"],
        ["serve", engine, "--port", str(used_port)],
        ["build", "--help"],
        ["inspect", engine],
        ["check", engine],
        ["run", engine, "--prompt", "ab", "--max-new-tokens", "3"],
        ["run", engine, "--prompt", "ab", "--max-new-tokens", "3", "--guide", '{"regex": "a+"}'],
        ["bench", "pairs", "--help"],
        ["bench", "pairs", engine, *bench, "--plot", str(tmp_path / "speed.svg")],
    ]
    # builds work without the other packages
    if package in ("torch", "onnx", "onnx_ir", "onnxscript"):
        target = str(text_target)
        commands.append(["build", "--model", target, "--output", str(tmp_path / "built")])
    done = subprocess.run(
        [sys.executable, without_packages.__file__, package, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    refused = 0
    for command, (code, errors) in zip(commands, results, strict=True):
        if code == 0 or "cannot listen on" in errors:
            continue
        if command[0] == "check" and code == 1:  # ``check`` reports missing packages in its table
            continue
        refused += 1
        assert code == 2, (command, errors)
        sentence = errors.strip().splitlines()[-1]
        assert re.search(rf"\[{extra}\]|extra {extra}\b", sentence), (command, sentence)
    assert refused or package not in CASES
