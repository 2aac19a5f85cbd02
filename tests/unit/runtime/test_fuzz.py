"""A sample of the cases of `make fuzz`, with toy engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_directory import VOCAB, manifest_of, write_engine, write_manifest
from fuzz.log import rows_of
from fuzz.subjects import TEMPLATE, write_checkpoints
from test_cuda_engine_directory import write_cuda_engine

TESTS = Path(__file__).parents[2]
MUTANTS = 150
# A server needs an engine whose rows do not hang on each other's pages (serve/test_fuzzed.py).
NAMES = ("engine", "cuda", "checkpoint", "gguf", "prompt", "template")
KINDS = [word for name in NAMES for word in ("--kind", name)]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("subjects")
    weights = write_engine(path / "cpu")
    (path / "cpu/tokenizer.json").write_text(json.dumps(toy_tokenizer()))
    (path / "cpu/chat_template.jinja").write_text(TEMPLATE)
    for name in ("manifest.json", "manifest.sha256"):
        (path / "cpu" / name).unlink()
    write_manifest(path / "cpu", manifest_of(path / "cpu", weights))
    write_cuda_engine(path / "cuda")
    write_checkpoints(path)
    return path


def toy_tokenizer() -> dict[str, object]:
    """Return a tokenizer with one token per word, as many as the toy's vocabulary."""
    words = ["?", "the", "quick", "brown", "fox", *(f"w{i}" for i in range(VOCAB - 5))]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(words)},
            "unk_token": "?",
        },
    }


def fuzz(subjects: Path, log: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "fuzz", "--subjects", subjects, "--log", log),
            *map(str, arguments),
        ],
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def test_no_mutant_of_a_sample_is_a_finding(subjects: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    done = fuzz(subjects, log, "--mutants", MUTANTS, *KINDS)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(log)
    assert sorted(row["seed"] for row in rows) == list(range(MUTANTS))
    assert {"refused", "same", "other"} == {row["verdict"] for row in rows}
    # What was done is not done again.
    done = fuzz(subjects, log, "--mutants", MUTANTS, *KINDS)
    assert rows_of(log) == rows
    assert done.stdout.splitlines()[-1].split()[:2] == ["all", str(MUTANTS)]
