"""The runtime does not depend on ops: none of its strings is the name of one (law 1)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from specbuild.plugins_cuda.registry import all_ops

ROOT = Path(__file__).parents[2]
# English words at the beginning of sentences that are also names of ops.
WORDS = {"Advance", "Capture", "Choose", "Embed", "Linear"}


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Return every string constant with its line, including docstrings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def names_in(text: str) -> set[str]:
    """Return the ops in a string; English words count only if they are the full string."""
    named = set(re.findall(r"\w+", text)) & set(all_ops())
    return {name for name in named if name not in WORDS or text == name}


def test_no_string_of_the_runtime_names_an_op() -> None:
    assert set(all_ops()) >= WORDS
    files = sorted((ROOT / "runtime").rglob("*.py"))
    assert files
    result = [
        f"{file.relative_to(ROOT)}:{line} names {', '.join(sorted(names))}"
        for file in files
        for line, text in strings(file.read_text(encoding="utf-8"))
        if (names := names_in(text))
    ]
    assert not result


def test_detects_names_in_code_and_docstrings() -> None:
    assert names_in("RmsMoe") == {"RmsMoe"}
    assert names_in("the logits of RmsMoe's router") == {"RmsMoe"}
    assert names_in("Choose") == {"Choose"} and not names_in("Choose another.")
