"""Random tensors that can be generated row by row, in any order, and repeatedly.

A row consists of segments of a table of random values, at places given by a hash of (seed, tensor,
row, segment). Copying is far faster than random generation, and rows are independent. With a
million places, two rows of a model share almost nothing.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
import xxhash

_TABLE = 1 << 20
_PLACE_BITS = 20
_FLOATS = 32  # values of a segment
_BYTES = 160
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Noise:
    """All random numbers of one seed; ``name`` distinguishes tensors."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def generator(self, name: str) -> torch.Generator:
        """Return a separate generator for what is drawn at once, such as a permutation."""
        return torch.Generator().manual_seed(self._hash(name) >> 1)

    def normal(self, name: str, rows: torch.Tensor, width: int, std: float = 1.0) -> torch.Tensor:
        """Return rows ``rows`` [n] of normal values with deviation ``std``: fp32 [n, width]."""
        return self._cut(self._normals * std, _FLOATS, name, rows, width)

    def weight(self, name: str, rows: torch.Tensor, width: int, std: float) -> torch.Tensor:
        """Return the same in bf16."""
        return self._cut((self._normals * std).bfloat16(), _FLOATS, name, rows, width)

    def bytes(self, name: str, rows: torch.Tensor, width: int) -> torch.Tensor:
        """Return rows of uniform bytes: u8 [n, width]."""
        return self._cut(self._uniform, _BYTES, name, rows, width)

    def choices(self, name: str, rows: torch.Tensor, width: int, among: list[int]) -> torch.Tensor:
        """Return rows of bytes from ``among``, equally often: u8 [n, width]."""
        table = torch.tensor(among, dtype=torch.uint8)[self._uniform.long() * len(among) >> 8]
        return self._cut(table, _BYTES, name, rows, width)

    def _cut(
        self, table: torch.Tensor, segment: int, name: str, rows: torch.Tensor, width: int
    ) -> torch.Tensor:
        count = -(-width // segment)
        places = self._places(name, rows.numpy(), count)
        windows = table.unfold(0, segment, 1)
        whole = torch.index_select(windows, 0, places).view(len(rows), count * segment)
        return whole if count * segment == width else whole[:, :width].contiguous()

    def _places(self, name: str, rows: np.ndarray, count: int) -> torch.Tensor:
        """Return the starts of segments, int64 [rows·count]: the finaliser of SplitMix64."""
        index = rows.astype(np.uint64)[:, None] * np.uint64(count) + np.arange(
            count, dtype=np.uint64
        )
        x: np.ndarray = np.uint64(self._hash(name)) + index.ravel() * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return torch.from_numpy((x >> np.uint64(64 - _PLACE_BITS)).astype(np.int64))

    def _hash(self, name: str) -> int:
        return xxhash.xxh3_64_intdigest(f"{self._seed}:{name}".encode())

    @cached_property
    def _normals(self) -> torch.Tensor:
        return torch.randn(_TABLE + _FLOATS, generator=self.generator("table of normals"))

    @cached_property
    def _uniform(self) -> torch.Tensor:
        blank = torch.empty(_TABLE + _BYTES, dtype=torch.uint8)
        return blank.random_(generator=self.generator("table of bytes"))
