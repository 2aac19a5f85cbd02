"""Places the scratch tensors of a program in one arena, by their lifetimes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 256


@dataclass(frozen=True)
class Span:
    """Scratch bytes that are in use from op ``first`` to op ``last``, both included."""

    bytes: int
    first: int
    last: int

    def overlaps(self, other: Span) -> bool:
        """Whether both are in use at once."""
        return self.first <= other.last and other.first <= self.last


def aligned(size: int) -> int:
    """The size rounded up to where the next buffer may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def place(spans: Sequence[Span]) -> tuple[list[int], int]:
    """An offset for every span, and the arena's size.

    Greedy by size: the largest first, each at the lowest offset that no span in use at the same
    time takes (Pisarchyk and Lee, arXiv 2001.03288). Offsets are multiples of ``ALIGNMENT``.
    """
    offsets = [0] * len(spans)
    placed: list[int] = []  # indices of spans, by rising offset
    total = 0
    for index in sorted(range(len(spans)), key=lambda i: (-spans[i].bytes, spans[i].first, i)):
        span = spans[index]
        start = 0
        for other in placed:
            if not spans[other].overlaps(span):
                continue
            if start + span.bytes <= offsets[other]:
                break
            start = max(start, aligned(offsets[other] + spans[other].bytes))
        offsets[index] = start
        placed.append(index)
        placed.sort(key=offsets.__getitem__)
        total = max(total, aligned(start + span.bytes))
    return offsets, total
