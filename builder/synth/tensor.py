"""A tensor that is generated on request, in full or in part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from specbuild.builder.checkpoint.source import DTYPE_BITS, SourceTensor

CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class SynthTensor:
    """One tensor of a synthetic checkpoint.

    ``part(first, end)`` returns the entries first … end−1 along the first axis; equal calls return
    equal tensors. ``std`` is the deviation of normal values around 0, None for other rules.
    """

    dtype: str
    shape: tuple[int, ...]
    part: Callable[[int, int], torch.Tensor]
    std: float | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def chunks(self) -> Iterator[torch.Tensor]:
        """Yield the tensor in parts of about 32 MiB."""
        length = self.shape[0]
        step = max(1, CHUNK_BYTES * length // self.nbytes)
        for first in range(0, length, step):
            yield self.part(first, min(first + step, length))

    def load(self) -> torch.Tensor:
        """Return the complete tensor, filled part by part."""
        parts = self.chunks()
        first = next(parts)
        if len(first) == self.shape[0]:
            return first
        whole = torch.empty(self.shape, dtype=first.dtype)
        whole[: len(first)] = first
        end = len(first)
        for part in parts:
            whole[end : end + len(part)] = part
            end += len(part)
        return whole

    def source(self, name: str, made_as: str) -> SourceTensor:
        """Return the tensor as a checkpoint's reader; ``made_as`` is its origin in the engine."""
        return SourceTensor(name, self.dtype, self.shape, (made_as,), self.load, None, None)


def whole_tensor(
    dtype: str, shape: tuple[int, ...], make: Callable[[], torch.Tensor]
) -> SynthTensor:
    """Return a small tensor that is generated at once."""
    return SynthTensor(dtype, shape, lambda first, end: make()[first:end])
