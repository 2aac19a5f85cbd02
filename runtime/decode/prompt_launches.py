"""How many rows launches of prompts have, and where they may end."""

from __future__ import annotations

# Padding costs little in launches of up to this many rows. While sequences decode, it is also the
# largest launch: it takes as long as a few steps, and a larger one would delay their tokens.
CHEAP_PADDING_ROWS = 2048
# A larger launch costs the same however many of its rows are used. It is selected only if at least
# this share of its rows is used.
_MIN_FILL = 0.75


def launch_rows(remaining: int, max_rows: int, *, decoding: bool = False) -> int:
    """Return the rows of the next launch, at most ``max_rows``.

    ``remaining`` prompt rows are not prefilled yet. Larger launches read the experts' weights less
    often. Above ``CHEAP_PADDING_ROWS``, an engine has launches of that size times a power of two.
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


def whole_steps(length: int, count: int, remaining: int, *, step: int, is_first: bool) -> int:
    """Return how many of a prompt's next tokens a chunk has, to end at a multiple of ``step``.

    ``length`` tokens precede them, and ``remaining`` are left. There are at most ``count``, perhaps
    none. Only the first chunk of a launch always reaches the next multiple, so prompts advance
    whatever ``count`` is.
    """
    last = (length + count) // step * step
    if last <= length and is_first:
        return min((length // step + 1) * step - length, remaining)
    return max(last - length, 0)
