"""Integer arrays that place the rows of a launch in the caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specbuild.runtime.cache.sequence_pages import SequencePages
from specbuild.runtime.engine_dir.manifest import Role

_PAGE_TABLE = ".page_table"
_PAGE_POSITION = ".page_position"


@dataclass(frozen=True)
class RowLayout:
    """The rows of a launch: sequence b has ``count[b]`` rows at slots ``first[b]`` and up.

    Slots from ``tree_start[b]`` on are tree nodes; those before are committed tokens.
    """

    first: Sequence[int]
    count: Sequence[int]
    tree_start: Sequence[int]

    @property
    def rows(self) -> int:
        """Number of rows of the launch."""
        return sum(self.count)

    def row_start(self) -> np.ndarray:
        """Return the first row of each sequence, and the end: int32 [B + 1], read-only."""
        return _row_start(tuple(self.count))


@lru_cache(maxsize=1024)
def _row_start(count: tuple[int, ...]) -> np.ndarray:
    starts = np.cumsum([0, *count], dtype=np.int32)
    starts.setflags(write=False)
    return starts


def groups_of(role: Role) -> tuple[str, ...]:
    """Return the cache groups that a graph reads, from the names of its inputs."""
    names = [port.name for port in role.inputs]
    return tuple(n.removesuffix(_PAGE_TABLE) for n in names if n.endswith(_PAGE_TABLE))


class SlotCounter:
    """Ranges of consecutive int32 numbers, as views of one array."""

    def __init__(self, capacity: int) -> None:
        self._numbers = np.arange(capacity, dtype=np.int32)

    def range(self, first: int, count: int) -> np.ndarray:
        """Return ``first … first + count − 1``."""
        return self._numbers[first : first + count]

    def ranges(self, first: Sequence[int], count: Sequence[int]) -> np.ndarray:
        """Return the concatenated ranges."""
        if len(first) == 1:
            return self.range(first[0], count[0])
        return np.concatenate([self.range(f, n) for f, n in zip(first, count, strict=True)])


def cache_feeds(
    group: str, holders: Sequence[SequencePages], layout: RowLayout, counter: SlotCounter
) -> dict[str, np.ndarray]:
    """Return ``page_table [1,B,1,P]``, ``row_slot``, ``write_slot [T]`` and ``tree_start [B]``.

    The view of a sequence starts at the first page that its rows attend to. ``row_slot`` and
    ``tree_start`` count from there; ``write_slot`` is a slot of the pool. ``page_position [B,P]``
    is the first position of each page, for groups whose keys get RoPE when they are read.
    """
    if len(holders) == 1:
        return _one_sequence_feeds(group, holders[0], layout, counter)
    first_pages = [
        holder.view_page(min(f, t))
        for holder, f, t in zip(holders, layout.first, layout.tree_start, strict=True)
    ]
    base = [page * holder.page_size for page, holder in zip(first_pages, holders, strict=True)]
    shifted = [f - b for f, b in zip(layout.first, base, strict=True)]
    writes = [
        h.slots[f : f + n] for h, f, n in zip(holders, layout.first, layout.count, strict=True)
    ]
    views = [slice(page, h.end_page) for page, h in zip(first_pages, holders, strict=True)]
    widest = max(view.stop - view.start for view in views)
    table = np.zeros((1, len(views), 1, widest), np.int32)
    positions = np.zeros((len(views), widest), np.int32)
    for b, (holder, view) in enumerate(zip(holders, views, strict=True)):
        table[0, b, 0, : view.stop - view.start] = holder.table[view]
        positions[b, : view.stop - view.start] = holder.page_positions[view]
    tree_start = [t - b for t, b in zip(layout.tree_start, base, strict=True)]
    return {
        f"{group}{_PAGE_TABLE}": table,
        f"{group}.row_slot": counter.ranges(shifted, layout.count),
        f"{group}.tree_start": np.array(tree_start, np.int32),
        f"{group}.write_slot": np.concatenate(writes),
        f"{group}{_PAGE_POSITION}": positions,
    }


def _one_sequence_feeds(
    group: str, holder: SequencePages, layout: RowLayout, counter: SlotCounter
) -> dict[str, np.ndarray]:
    """Return the feeds of a single sequence as views of existing arrays."""
    first, count = layout.first[0], layout.count[0]
    first_page = holder.view_page(min(first, layout.tree_start[0]))
    base = first_page * holder.page_size
    view = slice(first_page, holder.end_page)
    return {
        f"{group}{_PAGE_TABLE}": holder.table[view][None, None, None],
        f"{group}.row_slot": counter.range(first - base, count),
        f"{group}.tree_start": counter.range(layout.tree_start[0] - base, 1),
        f"{group}.write_slot": holder.slots[first : first + count],
        f"{group}{_PAGE_POSITION}": holder.page_positions[view][None],
    }
