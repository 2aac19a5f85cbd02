"""The number of rows of prefill launches."""

from __future__ import annotations

# Padding costs little in launches of up to this many rows. While sequences decode, it is also the
# largest launch: it takes as long as a few steps, and a larger one would delay their tokens.
CHEAP_PADDING_ROWS = 2048
# A larger launch costs the same however many of its rows are used. It pays from this share on.
_MIN_FILL = 0.75


def launch_rows(remaining: int, max_rows: int, *, decoding: bool = False) -> int:
    """Return the rows of the next launch: at most ``max_rows``, with ``remaining`` prompt rows
    left.

    Larger launches read the experts' weights less often. Above ``CHEAP_PADDING_ROWS``, an engine
    has launches of that size times a power of two.
    """
    if decoding or max_rows <= CHEAP_PADDING_ROWS:
        return min(max_rows, CHEAP_PADDING_ROWS)
    size = CHEAP_PADDING_ROWS
    while size * 2 <= max_rows and remaining >= _MIN_FILL * size * 2:
        size *= 2
    return size


def prompt_launches(tokens: int, max_rows: int) -> list[int]:
    """Return the launch sizes for a single prompt of this many tokens."""
    chunks: list[int] = []
    while tokens:
        chunks.append(min(tokens, launch_rows(tokens, max_rows)))
        tokens -= chunks[-1]
    return chunks
