"""Models of Hugging Face as MODEL, downloaded from a local server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub, running

RUN = ("ab", "--max-new-tokens", "4", "--max-seq-len", "64", "--json")


@pytest.fixture
def hub(tmp_path: Path, text_target: Path, text_draft: Path) -> Iterator[FakeHub]:
    """A hub with a model and files that must not be downloaded, a gated model, and a draft."""
    model = tmp_path / "published"
    shutil.copytree(text_target, model)
    for name in ("pytorch_model.bin", "modeling_custom.py", "original/consolidated.safetensors"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(b"not to be loaded")
    repositories = {"org/model": model, "org/gated": model, "org/draft": text_draft}
    hub = FakeHub(repositories, gated=frozenset({"org/gated"}))
    with running(hub):
        yield hub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def run(hub: FakeHub, home: Path, *words: str, **variables: str) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error of ``specbuild`` with this hub."""
    done = subprocess.run(
        [sys.executable, "-m", "specbuild", *words],
        env=os.environ
        | hub.environment(home)
        | {"SPECBUILD_CACHE_DIR": str(home / "specbuild")}
        | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_model_is_downloaded_built_and_cached(hub: FakeHub, home: Path) -> None:
    code, out, err = run(hub, home, "run", "org/model", *RUN)
    assert code == 0, err
    assert "downloading org/model" in err
    published = hub.repositories["org/model"].iterdir()
    allowed = {
        file.name for file in published if file.suffix in (".safetensors", ".json", ".jinja")
    }
    assert set(hub.requested) == allowed
    assert "building org/model for cpu" in err

    # Without a network the cached files are used, and the same engine.
    offline = run(hub, home, "run", "org/model", *RUN, HF_HUB_OFFLINE="1")
    assert offline[0] == 0, offline[2]
    assert json.loads(offline[1])["output_ids"] == json.loads(out)["output_ids"]
    assert "building" not in offline[2]
    pinned = run(hub, home, "run", "org/model", *RUN, "--revision", COMMIT, HF_HUB_OFFLINE="1")
    assert pinned[0] == 0, pinned[2]
    code, _, err = run(hub, home, "inspect", "org/model")
    assert code == 0, err


def test_a_draft_is_downloaded_too(hub: FakeHub, home: Path) -> None:
    code, out, err = run(hub, home, "run", "org/model", *RUN, "--draft", "org/draft")
    assert code == 0, err
    assert "downloading org/draft" in err
    engines = run(hub, home, "cache", "list", "--json")[1]
    assert "org--draft" in json.loads(engines)["draft"]
    plain = run(hub, home, "run", str(hub.repositories["org/model"]), *RUN)
    assert json.loads(plain[1])["output_ids"] == json.loads(out)["output_ids"]


@pytest.mark.parametrize(
    ("words", "variables", "parts"),
    [
        (("org/gated",), {}, ["is gated", "https://huggingface.co/org/gated", "hf download"]),
        (("org/absent",), {}, ["check the name", "hf auth login", "hf download org/absent"]),
        (("org/model", "--revision", "v9"), {}, ["org/model has no revision v9"]),
        (
            ("org/model", "--revision", "v9"),
            {"HF_HUB_OFFLINE": "1"},
            ["HF_HUB_OFFLINE is set", "hf download org/model --revision v9"],
        ),
        (
            ("org/model",),
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            ["Hugging Face cannot be reached", "hf download org/model"],
        ),
    ],
    ids=["gated", "absent", "revision", "offline", "unreachable"],
)
def test_reports_a_failed_download_in_one_line(
    hub: FakeHub, home: Path, words: tuple[str, ...], variables: dict[str, str], parts: list[str]
) -> None:
    code, out, err = run(hub, home, "inspect", *words, **variables)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("specbuild: ")
    assert all(part in line for part in parts), line
