"""32-bit words of small quantized values, with their bits in the order that kernels unpack."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PlacedWords:
    """An order of bits.

    ``places`` lists, for each value of a word, the destinations of its bits, lowest bit first.
    Every bit occurs once.
    """

    places: tuple[tuple[int, ...], ...]

    def placed(self, codes: torch.Tensor) -> torch.Tensor:
        """Convert bytes u8 [..., 4·n], lowest bits first, to words int32 [..., n] in this order."""
        import torch

        return _mapped(self, codes.contiguous().view(torch.int32), inverse=False)

    def natural(self, words: torch.Tensor) -> torch.Tensor:
        """Invert :meth:`placed`."""
        import torch

        return _mapped(self, words.contiguous(), inverse=True).view(torch.uint8)


@cache
def _half_tables(
    words: PlacedWords, inverse: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tables of permuted bits, by the low and the high 16 bits of a word, int32."""
    import torch

    placed = [place for code in words.places for place in code]
    natural = list(range(32))
    source, target = (placed, natural) if inverse else (natural, placed)
    to = dict(zip(source, target, strict=True))
    values = torch.arange(1 << 16, dtype=torch.int64, device=device)
    tables = []
    for first in (0, 16):
        word = torch.zeros_like(values)
        for bit in range(16):
            word |= (values >> bit & 1) << to[first + bit]
        tables.append(word.to(torch.int32))
    return tables[0], tables[1]


def _mapped(words: PlacedWords, source: torch.Tensor, *, inverse: bool) -> torch.Tensor:
    """Return int32 words with permuted bits."""
    low, high = _half_tables(words, inverse, source.device)
    flat = source.flatten()
    mapped = low.index_select(0, flat & 0xFFFF) | high.index_select(0, flat >> 16 & 0xFFFF)
    return mapped.view(source.shape)
