"""Assigns offsets in one arena to the scratch tensors of a program, by their lifetimes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 256


@dataclass(frozen=True)
class Span:
    """Scratch bytes in use from op ``first`` to op ``last``, both included."""

    bytes: int
    first: int
    last: int

    def overlaps(self, other: Span) -> bool:
        """Return whether both are in use at the same time."""
        return self.first <= other.last and other.first <= self.last


def aligned(size: int) -> int:
    """Return the size rounded up to the alignment of buffers."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def place(spans: Sequence[Span]) -> tuple[list[int], int]:
    """Return an offset for every span, and the size of the arena.

    Greedy by size (Pisarchyk and Lee, arXiv 2001.03288): the largest span first, each at the lowest
    offset that overlaps no span in use at the same time. Offsets are multiples of ``ALIGNMENT``.
    """
    offsets = [0] * len(spans)
    placed: list[int] = []  # indices of spans, by ascending offset
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
