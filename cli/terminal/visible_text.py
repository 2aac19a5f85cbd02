"""Makes text from engines, checkpoints and models safe to print on a terminal."""

from __future__ import annotations

import unicodedata

# Controls, right-to-left and hidden marks, halves of pairs, and line ends beyond ASCII.
_ESCAPED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# Joiners of letters and emoji, which move no cursor.
_JOINERS = "\u200c\u200d"


def visible(text: str, *, keep: str = "\n\t") -> str:
    """Return ``text`` with all characters escaped that a terminal interprets, except ``keep``."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in keep else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    if character in _JOINERS or unicodedata.category(character) not in _ESCAPED:
        return character
    return ascii(character)[1:-1]
