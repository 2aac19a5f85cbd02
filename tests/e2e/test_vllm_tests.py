"""vLLM's tests of its server, run against this one: a list of the passing tests, and reasons.

pip fetches the source distribution when the test runs; nothing of it is in this repository.
``tests/vllm_tests`` has the list, a replacement of vLLM's helper that starts servers, and
substitutes for its modules.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from page_commands import ROOT

from specbuild.cli.options.vllm_flags import serve_words
from specbuild.runtime.errors import SpecbuildError

FOLDER = ROOT / "tests" / "vllm_tests"
LIST: dict[str, Any] = tomllib.loads((FOLDER / "judged.toml").read_text(encoding="utf-8"))
# Packages that vLLM's setup.py and tests import, all of them pure Python or small.
NEEDED = (
    "setuptools-scm", "vcs-versioning", "setuptools-rust", "semantic_version",
    "pytest-asyncio", "pybase64",
)  # fmt: skip
INI = """[pytest]
asyncio_mode = strict
asyncio_default_fixture_loop_scope = function
markers =
    skip_global_cleanup
"""
# Folders of vLLM's tests that request text from a server.
JUDGED = ("openai", "anthropic", "serve")


def pip(*words: str | Path, **environment: str) -> None:
    """Run pip; skip the test if it cannot reach an index."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    if done.returncode:
        pytest.skip(f"pip cannot fetch {words[-1]}: {done.stderr[-300:]}")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's tests, with the replaced helpers and modules; required packages are in ``needed``."""
    folder = tmp_path_factory.mktemp("vllm")
    needed, pinned = folder / "needed", folder / "pinned.txt"
    pip("install", "--quiet", "--no-deps", "--target", needed, *NEEDED)
    pinned.write_text(f"vllm=={LIST['version']} --hash=sha256:{LIST['sha256']}\n")
    words = ("--no-deps", "--no-binary", "vllm", "--no-build-isolation", "--dest", folder)
    settings = {
        "PYTHONPATH": str(needed),
        "VLLM_VERSION_OVERRIDE": LIST["version"],
        "VLLM_TARGET_DEVICE": "empty",
    }
    pip("download", "--quiet", *words, "--require-hashes", "-r", pinned, **settings)
    with tarfile.open(folder / f"vllm-{LIST['version']}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    source, tree = folder / f"vllm-{LIST['version']}", folder / "tree"
    shutil.copytree(source / "tests" / "entrypoints", tree / "tests" / "entrypoints")
    shutil.copytree(source / "examples", tree / "examples")
    (tree / "tests" / "__init__.py").touch()
    (tree / "tests" / "conftest.py").write_text("LocalAssetServer = None\n")
    (tree / "pytest.ini").write_text(INI)
    shutil.copy(FOLDER / "remote_server.py", tree / "tests" / "utils.py")
    shutil.copy(FOLDER / "vllm_modules.py", tree / "vllm_modules.py")
    return tree


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of SmolLM2 for the CPU, in the sizes that the tests expect."""
    folder = tmp_path_factory.mktemp("smollm2")
    fetch = [sys.executable, ROOT / "examples" / "smollm2" / "fetch_model.py", "--output", folder]
    fetched = subprocess.run(fetch, capture_output=True, text=True, check=False)
    if fetched.returncode:
        pytest.skip(f"SmolLM2 cannot be fetched: {fetched.stderr[-300:]}")
    limits = ("--max-batch-size", "8", "--max-seq-len", "8192")
    words = (
        "--model",
        fetched.stdout.strip(),
        "--backend",
        "cpu",
        "--output",
        str(folder / "engine"),
    )
    command = [sys.executable, "-m", "specbuild.cli.main", "build", *words, *limits]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "engine"


def run(tree: Path, engine: Path, *words: str) -> list[dict[str, str]]:
    """Run pytest on vLLM's tests; return the outcome of each."""
    outcomes = tree / "outcomes.jsonl"
    outcomes.unlink(missing_ok=True)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tree.parent / "needed"), str(tree)]),
        "SPECBUILD_JUDGED_ENGINE": str(engine),
        "SPECBUILD_JUDGED_OUTCOMES": str(outcomes),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "vllm_modules", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--timeout", "300", "--continue-on-collection-errors", *words],
        cwd=tree, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "--collect-only" in words:
        lines = done.stdout.splitlines()
        # Tests, and files that cannot be imported.
        names = [x for x in lines if re.match(r"tests/.*\.py::|ERROR tests/", x)]
        return [{"test": name.removeprefix("ERROR ").split(" - ")[0]} for name in names]
    assert outcomes.exists(), done.stdout[-3000:]
    return [json.loads(line) for line in outcomes.read_text().splitlines()]


def reason_for(test: str) -> str | None:
    """Return the reason for a test: by its name, or that of its function, file or folder."""
    reasons: dict[str, str] = LIST["reasons"]
    function = test.split("[", maxsplit=1)[0]
    names = [test, function, function.split("::")[0]]
    while "/" in names[-1]:
        names.append(names[-1].rpartition("/")[0])
    return next((reasons[name] for name in names if name in reasons), None)


@pytest.mark.slow
def test_every_test_of_vllm_is_listed(tree: Path, tmp_path: Path) -> None:
    files = [f"tests/entrypoints/{folder}" for folder in JUDGED]
    collected = {entry["test"] for entry in run(tree, tmp_path, "--collect-only", *files)}
    names = {name.removeprefix("tests/entrypoints/") for name in collected}
    assert len(names) > 300
    passing = set(LIST["passing"])
    assert passing <= names, sorted(passing - names)
    assert not [name for name in names - passing if reason_for(name) is None]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_listed_tests_of_vllm_pass(tree: Path, smollm2: Path) -> None:
    outcomes = run(tree, smollm2, *(f"tests/entrypoints/{name}" for name in LIST["passing"]))
    failed = {o["test"]: o["error"] for o in outcomes if o["outcome"] != "passed"}
    assert not failed
    counts = Counter(outcome["test"] for outcome in outcomes)
    assert len(counts) == len(LIST["passing"])


@pytest.mark.slow
def test_every_flag_of_vllm_is_known(tree: Path) -> None:
    """Every flag is translated, accepted with a message or rejected with a reason."""
    source = tree.parent / f"vllm-{LIST['version']}" / "vllm"
    parsers = ("engine/arg_utils.py", "entrypoints/cli/serve.py", "entrypoints/common/cli_args.py")
    text = "".join((source / file).read_text(encoding="utf-8") for file in parsers)
    flags = set(re.findall(r'add_argument\(\s*"(--[a-z0-9-]+)"', text))
    fields = re.search(r"class FrontendArgs.*?\n    @", text, re.DOTALL)
    assert fields is not None
    flags |= {
        f"--{name.replace('_', '-')}"
        for name in re.findall(r"^    ([a-z]\w*): ", fields[0], re.MULTILINE)
    }
    assert len(flags) > 200
    command = [sys.executable, "-m", "specbuild.cli.main", "serve", "--help"]
    page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    documented = set(re.findall(r"--[a-z0-9-]+", page))
    unknown = []
    for flag in sorted(flags - documented):
        try:
            words, _ = serve_words(["m", flag, "1"])
        except SpecbuildError:
            continue
        unknown += [flag] if flag in words else []
    assert not unknown
