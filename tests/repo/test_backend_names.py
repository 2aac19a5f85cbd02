"""A backend is an object with properties: its name is compared nowhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = {"cpu", "cuda", "tensorrt", "tensorrt-rtx"}
# Where the word is another's, and whose.
ALLOWED = {
    "builder/training/heads/attention.py": "torch's device",
    "builder/training/heads/run.py": "torch's device",
    "builder/training/heads/workers.py": "torch's device",
}


def compared_names(source: str) -> Iterator[int]:
    """Lines that compare something with a backend's name, by ==, !=, in, not in, or a match."""
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
    found = {}
    for package in ("runtime", "plugins_cuda", "builder", "cli"):
        for file in sorted((ROOT / package).rglob("*.py")):
            lines = list(compared_names(file.read_text(encoding="utf-8")))
            if lines:
                found[str(file.relative_to(ROOT))] = lines
    return found


def test_no_backend_is_chosen_by_its_name() -> None:
    assert {file: lines for file, lines in comparing_files().items() if file not in ALLOWED} == {}


def test_what_is_allowed_is_used() -> None:
    assert set(ALLOWED) <= set(comparing_files())


def test_every_way_of_comparing_is_seen() -> None:
    for source in (
        "x.backend == 'cuda'",
        "'cpu' != x",
        "x in ('cuda', 'tensorrt')",
        "match x:\n    case 'tensorrt-rtx':\n        pass",
    ):
        assert list(compared_names(source))
    assert not list(compared_names("BACKENDS['cuda']"))
