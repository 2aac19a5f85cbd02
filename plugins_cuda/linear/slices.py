"""How warps divide K, and the rounds of stages through which they read a slice.

Slices and their groups determine the order of additions. Both depend on K only, so that the result
of a row is the same for every number of rows and every storage.
"""

from __future__ import annotations

from specbuild.plugins_cuda.linear.storage import Storage

_MAX_WARPS = 16
# Blocks of K with which 64 tokens have 160 KB. With 36, groups of K = 5120 would have 2 slices, not
# 4, so that projections of 64 rows would store twice the sums and take 14 % more time.
_MAX_GROUP_BLOCKS = 40
# A launch has at least so many warps, each with a slice of a group.
_MAX_GROUP_SLICES = 12
# Steps of a quantized weight in shared memory.
MIN_PLACES, MAX_ROUND = 2, 7


def slices_of(blocks: int) -> int:
    """Return the warps that split ``blocks`` of K: as many as are evenly busy, at most 16."""
    if blocks <= _MAX_WARPS:
        return blocks

    def busy(warps: int) -> float:
        return blocks / (warps * -(-blocks // warps))

    return max(range(_MAX_WARPS // 2, _MAX_WARPS + 1), key=lambda warps: (busy(warps), warps))


def group_slices_of(slices: int, slice_blocks: int) -> int:
    """Return the slices that are added before groups are: as many as 64 tokens leave memory for."""
    max_slices = min(_MAX_GROUP_SLICES, max(1, _MAX_GROUP_BLOCKS // slice_blocks))
    return max(size for size in range(1, min(max_slices, slices) + 1) if slices % size == 0)


def whole_round(steps: int, least: int, most: int) -> int | None:
    """Return the smallest number of stages whose rounds are all the steps, or None."""
    return next((n for n in range(least, most + 1) if steps % n == 0), None)


def has_whole_rounds(blocks: int, storage: Storage) -> bool:
    """Return whether the slices of ``blocks`` of K are rounds of few stages."""
    units = storage.units(-(-blocks // slices_of(blocks)))
    return whole_round(units, MIN_PLACES, MAX_ROUND) is not None
