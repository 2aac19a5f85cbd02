"""The words that docs/developers/glossary.md replaced do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EVERYWHERE = r"^(runtime|builder|cli|docs)/|^README\.md$"
# Old word, where it may not stand, the word of the glossary, and what may stand all the same.
WORDS = [
    (r"[Rr]esident", EVERYWHERE, "device", r"[Aa]nonymous resident memory"),
    (r"[Nn]arrow(s|ed|ing)\b", EVERYWHERE, "sparse", r"(?:accepted_)?narrowed(?:_steps)?"),
    (r"\b[Rr]ooms?\b|_rooms?\b|\bROOM", EVERYWHERE, "capacity",
     r"\"room\": capacity|test_rooms\.py"),
    (r"[Tt]ally|tallies", EVERYWHERE, "counters", r"DsaTally|ViewTally|tally_lists"),
    (r"fed_again|\bfed again\b|\bfeeds? again\b|refed", EVERYWHERE, "re-verified",
     r"\"fed_again\""),
    (r"\b[Cc]aptured\b|captured_", EVERYWHERE, "aux hidden states",
     r"(?:score\.|last_|pending_)?captured(?:_rows|_blank)?[\"`\]]|captured (?:graph|as)"),
    (r"\btaps?\b|_taps?\b", EVERYWHERE, "aux layers", r"--taps|name=\"taps\""),
    (r"own_slots", EVERYWHERE, "split_per_warp", r"(?:attend_)?own_slots(?:\.cu)?[`\"]"),
    (r"placed_sequences|occupied_engine", EVERYWHERE, "benchmark batch", None),
    (r"\b[Mm]ixers?\b", EVERYWHERE, "consumer warpgroups", r"`mixers`"),
    (r"\b[Hh]ears?\b|\bsays why\b|\bcomes? to\b", EVERYWHERE, "a plain verb", None),
    (r"Slot(Table|Rows)|\bslot_of\b|RING_SLOTS|ring_slots", EVERYWHERE, "row, ring entry", None),
    (r"\b(?:chains? of (?:tiles|a split|a slot))", EVERYWHERE, "tile run", None),
]  # fmt: skip


def texts() -> list[tuple[str, str]]:
    """Every module and document with its text."""
    kept = {"docs/developers/glossary.md"}
    found = []
    for top in ("runtime", "builder", "cli", "docs"):
        for file in sorted((ROOT / top).rglob("*")):
            name = str(file.relative_to(ROOT))
            if file.suffix in (".py", ".md") and name not in kept:
                found.append((name, file.read_text(encoding="utf-8")))
    return [*found, ("README.md", (ROOT / "README.md").read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("word", "where", "instead", "allowed"), WORDS, ids=[instead for _, _, instead, _ in WORDS]
)
def test_a_replaced_word_does_not_come_back(
    word: str, where: str, instead: str, allowed: str | None
) -> None:
    found = []
    for name, text in texts():
        if not re.search(where, name):
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            rest = re.sub(allowed, "", line) if allowed else line
            if match := re.search(word, rest):
                found.append(f"{name}:{number}: {match[0]!r}")
    assert not found, f"say {instead}: docs/developers/glossary.md"
