"""The runtime knows no op: no string of it names one (law 1)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from specbuild.plugins_cuda.registry import all_ops

ROOT = Path(__file__).parents[2]
# Words of English that ops are named by too, where a sentence begins with them.
WORDS = {"Advance", "Capture", "Choose", "Embed", "Linear"}


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Every string constant with its line; docstrings are among them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def names_in(text: str) -> set[str]:
    """Ops that a string names; words only where they are all of it."""
    named = set(re.findall(r"\w+", text)) & set(all_ops())
    return {name for name in named if name not in WORDS or text == name}


def test_no_string_of_the_runtime_names_an_op() -> None:
    assert set(all_ops()) >= WORDS
    files = sorted((ROOT / "runtime").rglob("*.py"))
    assert files
    found = [
        f"{file.relative_to(ROOT)}:{line} names {', '.join(sorted(names))}"
        for file in files
        for line, text in strings(file.read_text(encoding="utf-8"))
        if (names := names_in(text))
    ]
    assert not found


def test_names_are_found_in_code_and_in_documentation() -> None:
    assert names_in("RmsMoe") == {"RmsMoe"}
    assert names_in("the logits of RmsMoe's router") == {"RmsMoe"}
    assert names_in("Choose") == {"Choose"} and not names_in("Choose another.")
