"""Documents that docstrings and comments cite stand in the repository, and so do their sections."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("runtime", "plugins_cuda", "builder", "cli", "tests", "benchmarks", "examples", "docs")
# A path from the root, and perhaps a section: as docs/developers/contracts.md#graphs.
CITED = re.compile(r"(?<![\w/.-])([\w./-]+\.md)\b(?:#([\w-]+))?")


def sources() -> list[Path]:
    suffixes = {".py", ".cu", ".cuh", ".cpp", ".h", ".c"}
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*")]
    return [ROOT / "Makefile", *sorted(file for file in files if file.suffix in suffixes)]


def prose(text: str) -> Iterator[str]:
    """Docstrings and comments of a Python source; other strings may be names of files to write."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def sections(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def stands(path: str, section: str) -> bool:
    document = ROOT / path
    return document.is_file() and (not section or section in sections(document))


def dead(text: str) -> list[str]:
    """Citations of a text that lead nowhere."""
    return [
        f"{path}#{section}" for path, section in CITED.findall(text) if not stands(path, section)
    ]


def test_what_sources_cite_exists() -> None:
    wrong = {}
    for file in sources():
        text = file.read_text(encoding="utf-8")
        parts = prose(text) if file.suffix == ".py" and ".md" in text else [text]
        if found := [citation for part in parts for citation in dead(part)]:
            wrong[str(file.relative_to(ROOT))] = found
    assert not wrong


def test_a_missing_document_and_a_missing_section_are_seen() -> None:
    assert not dead("(docs/developers/contracts.md#graphs), and README.md.")
    missing, section = "nowhere" + ".md", "README" + ".md#nowhere"
    assert dead(f"see {missing}") and dead(f"see {section}")
