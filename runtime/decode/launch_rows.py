"""How many rows the next launch of prompts takes."""

from __future__ import annotations

# Launches of up to so many rows are padded freely. They are also the largest while sequences
# decode: one lasts as long as a few steps, and a larger one would hold all their tokens up.
CHEAP_PADDING_ROWS = 2048
# A larger launch costs what a full one does, and pays where so many of its rows are wanted.
_MIN_FILL = 0.75


def launch_rows(remaining: int, max_rows: int, *, decoding: bool = False) -> int:
    """Rows of the next launch, ``most`` at most, where prompts have ``wanted`` rows left.

    Larger launches read the weights of all experts less often. Above ``FREELY_PADDED`` rows an
    engine has them for doublings of that number.
    """
    if decoding or max_rows <= CHEAP_PADDING_ROWS:
        return min(max_rows, CHEAP_PADDING_ROWS)
    size = CHEAP_PADDING_ROWS
    while size * 2 <= max_rows and remaining >= _MIN_FILL * size * 2:
        size *= 2
    return size


def prompt_launches(tokens: int, max_rows: int) -> list[int]:
    """The launches of one prompt of so many tokens, read alone."""
    chunks: list[int] = []
    while tokens:
        chunks.append(min(tokens, launch_rows(tokens, max_rows)))
        tokens -= chunks[-1]
    return chunks
