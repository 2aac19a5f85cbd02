"""32-bit words of small codes whose bits stand where kernels unpack them with few instructions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PlacedWords:
    """``places``: where the bits of each code of a word go, lowest first; every bit once."""

    places: tuple[tuple[int, ...], ...]

    def placed(self, codes: torch.Tensor) -> torch.Tensor:
        """Bytes u8 [..., 4·n] of codes, the first in the lowest bits → words int32 [..., n]."""
        import torch

        return _mapped(self, codes.contiguous().view(torch.int32), inverse=False)

    def natural(self, words: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`placed`."""
        import torch

        return _mapped(self, words.contiguous(), inverse=True).view(torch.uint8)


@cache
def _half_tables(words: PlacedWords, inverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """By the low and by the high 16 bits of a word: the word's bits at their places, int32."""
    import torch

    placed = [place for code in words.places for place in code]
    natural = list(range(32))
    source, target = (placed, natural) if inverse else (natural, placed)
    to = dict(zip(source, target, strict=True))
    values = torch.arange(1 << 16, dtype=torch.int64)
    tables = []
    for first in (0, 16):
        word = torch.zeros_like(values)
        for bit in range(16):
            word |= (values >> bit & 1) << to[first + bit]
        tables.append(word.to(torch.int32))
    return tables[0], tables[1]


def _mapped(words: PlacedWords, found: torch.Tensor, *, inverse: bool) -> torch.Tensor:
    """int32 with every word's bits permuted."""
    low, high = _half_tables(words, inverse)
    flat = found.flatten()
    mapped = low.index_select(0, flat & 0xFFFF) | high.index_select(0, flat >> 16 & 0xFFFF)
    return mapped.view(found.shape)
