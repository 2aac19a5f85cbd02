"""Clients of other projects, against a server whose model follows a script."""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients import openai_client
from serve.scripted import scripted_server

CLIENTS = Path(openai_client.__file__).parent


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_server() as url:
        yield url


def test_openais_client(url: str) -> None:
    openai_client.main(url)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packages", "program"),
    [
        (("openai>=2,<3",), "openai_client.py"),
        (("openai>=3,<4",), "openai_client.py"),
        (("openai-agents",), "agents_client.py"),
        (("langchain-openai",), "langchain_client.py"),
    ],
    ids=lambda given: given if isinstance(given, str) else given[0],
)
def test_clients_in_a_separate_environment(
    url: str, packages: tuple[str, ...], program: str, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    installed = subprocess.run(install, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"{packages[0]} cannot be installed here: {installed.stderr[-300:]}")
    done = subprocess.run(
        [python, CLIENTS / program, url], capture_output=True, text=True, check=False, timeout=800
    )
    assert done.returncode == 0, done.stderr
