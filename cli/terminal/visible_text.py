"""Text from engines, checkpoints and models as a terminal may have it: shown, never obeyed."""

from __future__ import annotations

import unicodedata

# Controls, what writes right to left or hides, halves of pairs, and ends of line beyond ASCII.
_ESCAPED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# They join letters and emoji, and move no cursor.
_JOINERS = "\u200c\u200d"


def visible(text: str, *, keep: str = "\n\t") -> str:
    """``text`` with every character that a terminal would obey as an escape, but for ``keep``."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in keep else _shown(c) for c in text)


def _shown(character: str) -> str:
    if character in _JOINERS or unicodedata.category(character) not in _ESCAPED:
        return character
    return ascii(character)[1:-1]
