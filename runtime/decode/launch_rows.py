"""How many rows the next launch of prompts takes."""

from __future__ import annotations

# Launches of up to so many rows are padded freely. They are also the largest while sequences
# decode: one lasts as long as a few steps, and a larger one would hold all their tokens up.
FREELY_PADDED = 2048
# A larger launch costs what a full one does, and pays where so many of its rows are wanted.
_LEAST_FULL = 0.75


def launch_rows(wanted: int, most: int, *, decoding: bool = False) -> int:
    """Rows of the next launch, ``most`` at most, where prompts have ``wanted`` rows left.

    Larger launches read the weights of all experts less often. Above ``FREELY_PADDED`` rows an
    engine has them for doublings of that number.
    """
    if decoding or most <= FREELY_PADDED:
        return min(most, FREELY_PADDED)
    size = FREELY_PADDED
    while size * 2 <= most and wanted >= _LEAST_FULL * size * 2:
        size *= 2
    return size


def prompt_launches(tokens: int, most: int) -> list[int]:
    """The launches of one prompt of so many tokens, read alone."""
    chunks: list[int] = []
    while tokens:
        chunks.append(min(tokens, launch_rows(tokens, most)))
        tokens -= chunks[-1]
    return chunks
