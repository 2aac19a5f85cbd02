"""The glossary: unique and sorted terms, whose files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "developers" / "glossary.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in GLOSSARY.splitlines()
    if line.startswith("| ") and not line.startswith(("| term |", "|---"))
]


def test_terms_are_unique_and_sorted() -> None:
    terms = [row[0] for row in ROWS]
    assert len(terms) == len(set(terms)) > 50
    folded = [re.sub(r"[^a-z ]", " ", term.lower()) for term in terms]
    assert folded == sorted(folded)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_term_has_a_short_definition_and_existing_files(row: list[str]) -> None:
    _, meaning, where = row
    assert all(len(sentence.split()) <= 30 for sentence in re.split(r"[.:] ", meaning))
    paths = re.findall(r"`((?:runtime|builder|cli|plugins_cuda|docs)/[^`]*)`", where)
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("op", sorted(set(re.findall(r"op `(\w+)`", GLOSSARY))))
def test_an_op_of_the_glossary_is_declared(op: str) -> None:
    declared = (path.read_text() for path in (ROOT / "plugins_cuda").glob("*/op.py"))
    assert any(f'name="{op}"' in text for text in declared)
