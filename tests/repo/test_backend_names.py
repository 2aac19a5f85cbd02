"""A backend is an object with properties: no code compares its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = {"cpu", "cuda", "tensorrt", "tensorrt-rtx"}
# Files in which the word has another meaning, and the meaning.
ALLOWED = {
    "builder/training/heads/attention.py": "torch's device",
    "builder/training/heads/run.py": "torch's device",
    "builder/training/heads/workers.py": "torch's device",
}


def compared_names(source: str) -> Iterator[int]:
    """Return lines that compare a backend's name, by ==, !=, in, not in, or a match statement."""
    for node in ast.walk(ast.parse(source)):
        compared: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            compared = [node.value]
        literals = (leaf for part in compared for leaf in ast.walk(part))
        if any(isinstance(leaf, ast.Constant) and leaf.value in NAMES for leaf in literals):
            yield node.lineno


@cache
def comparing_files() -> dict[str, list[int]]:
    by_key = {}
    for package in ("runtime", "plugins_cuda", "builder", "cli"):
        for file in sorted((ROOT / package).rglob("*.py")):
            lines = list(compared_names(file.read_text(encoding="utf-8")))
            if lines:
                by_key[str(file.relative_to(ROOT))] = lines
    return by_key


def test_no_code_compares_the_name_of_a_backend() -> None:
    assert {file: lines for file, lines in comparing_files().items() if file not in ALLOWED} == {}


def test_every_exception_of_backend_names_is_used() -> None:
    assert set(ALLOWED) <= set(comparing_files())


def test_detects_every_kind_of_comparison() -> None:
    for source in (
        "x.backend == 'cuda'",
        "'cpu' != x",
        "x in ('cuda', 'tensorrt')",
        "match x:\n    case 'tensorrt-rtx':\n        pass",
    ):
        assert list(compared_names(source))
    assert not list(compared_names("BACKENDS['cuda']"))
