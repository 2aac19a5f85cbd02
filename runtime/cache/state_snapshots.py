"""Copies of recurrent states in host memory, from which prompts with a cached prefix resume.

A state cannot be rebuilt from cached pages. So the prefix cache holds snapshots: at multiples of an
interval, and at the last boundary of each prompt. A prompt resumes at the last snapshot of the
prefix that it shares, and computes the tokens after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Protocol

import numpy as np

from specbuild.runtime.cache.page_pool import PagePool
from specbuild.runtime.cache.prefix_tree import PrefixEntry, PrefixTree, Span
from specbuild.runtime.cache.sequence_pages import SequencePages
from specbuild.runtime.cache.state_paths import StateSlot
from specbuild.runtime.engine_dir.cache_groups import SNAPSHOT_STEP
from specbuild.runtime.engine_dir.manifest import StateGroup

# Returns the pools of a group by name, each [slots, …], as views of the executor's memory.
StatePools = Callable[[], Mapping[str, np.ndarray]]


class StateCopies(Protocol):
    """Copies the states of a group's slots to host memory and back, in the order of the calls.

    Launches that are queued before a call come before it, and those that are queued later after it.
    """

    def save(self, slot: int) -> Any:
        """Return a copy of a slot."""
        ...

    def restore(self, saved: Any, slot: int) -> None:
        """Overwrite a slot with a copy."""
        ...

    def discard(self, saved: Any) -> None:
        """Free the memory of a copy."""
        ...


class HostStateCopies:
    """See :class:`StateCopies`; of pools in host memory, whose launches have ended."""

    def __init__(self, pools: StatePools) -> None:
        self._pools = pools

    def save(self, slot: int) -> dict[str, np.ndarray]:
        """See :class:`StateCopies`."""
        return {name: pool[slot].copy() for name, pool in self._pools().items()}

    def restore(self, saved: Mapping[str, np.ndarray], slot: int) -> None:
        """See :class:`StateCopies`."""
        for name, pool in self._pools().items():
            pool[slot] = saved[name]

    def discard(self, saved: Mapping[str, np.ndarray]) -> None:
        """See :class:`StateCopies`; the last reference to a copy frees it."""


@dataclass
class SnapshotStatistics:
    """Counters of snapshots since the engine was loaded."""

    state_snapshots: int = 0
    evicted_snapshots: int = 0


class StateSnapshots:
    """Up to ``capacity`` snapshots of the states of one group, placed in a prefix tree.

    In the tree a snapshot is the page of an allocator of its own: that of page i holds the state
    after pages 0 … i. ``pool`` hands out numbers from 1 on, and evicts the least recently used one.
    ``interval`` is a number of tokens, a multiple of :data:`SNAPSHOT_STEP`.
    """

    def __init__(
        self,
        group: StateGroup,
        copies: StateCopies,
        *,
        capacity: int,
        interval: int,
        page_size: int,
    ) -> None:
        self.group = group
        self.pool = PagePool(group.name, capacity + 1)
        self.page_size = page_size
        self._step = lcm(SNAPSHOT_STEP, page_size)
        self._interval = lcm(interval, page_size)
        self._copies = copies
        self._saved: dict[int, Any] = {}
        self._statistics = SnapshotStatistics()

    def attach(self, tree: PrefixTree, allocator: int, statistics: SnapshotStatistics) -> None:
        """Place snapshots in this tree from now on, as pages of this allocator."""
        self._tree, self._allocator, self._statistics = tree, allocator, statistics

    def next_position(self, length: int, prompt_tokens: int) -> int:
        """Return where the launch of a prompt must end that has computed ``length`` tokens.

        That is at its next snapshot, or at the end of the prompt. The last token of a prompt is
        always computed, so no snapshot is behind it.
        """
        last = (prompt_tokens - 1) // self._step * self._step
        if length >= last:
            return prompt_tokens
        return min((length // self._interval + 1) * self._interval, last)

    def capture(self, pages: Mapping[str, SequencePages], length: int, prompt_tokens: int) -> None:
        """Copy the state after ``length`` tokens of a prompt, if one is due there.

        The sequence with these ``pages`` holds the copy until it publishes them.
        """
        last = (prompt_tokens - 1) // self._step * self._step
        if not 0 < length <= last or (length != last and length % self._interval):
            return
        holder = self._slot_of(pages)
        number = self.pool.allocate(holder.owner)
        self._saved[number] = self._copies.save(holder.slot)
        holder.captured = (length // self.page_size, number)

    def restore(self, pages: Mapping[str, SequencePages]) -> None:
        """Give a sequence the state of the snapshot with which it was admitted, if any."""
        holder = self._slot_of(pages)
        if holder.snapshot is None:
            return
        self._copies.restore(self._saved[holder.snapshot], holder.slot)
        holder.source, holder.snapshot = holder.slot, None

    def place(self, spans: Sequence[Span], holder: SequencePages) -> None:
        """Publish a sequence's new snapshot, unless an earlier sequence left one there.

        ``spans`` are the branches of the sequence's tokens.
        """
        assert isinstance(holder, StateSlot)
        if holder.captured is None:
            return
        (count, number), holder.captured = holder.captured, None
        entry = next(span.entry for span in spans if span.first < count <= span.end)
        pages = np.array([number], np.intp)
        placed, _ = self._tree.place(self._allocator, Span(entry, count - 1, count), pages)
        self.pool.cache(placed)
        self.pool.release([number], holder.owner)
        self._statistics.state_snapshots += len(placed)
        if not len(placed):
            self._copies.discard(self._saved.pop(number))

    def forget_evicted(self, number: int) -> None:
        """Remove an evicted snapshot from the tree, and free its memory."""
        self._tree.remove(self._allocator, number)
        self._copies.discard(self._saved.pop(number))
        self._statistics.evicted_snapshots += 1

    def discard_after(self, entry: PrefixEntry, index: int) -> None:
        """Evict the snapshot after an evicted page: without the page nothing can resume there."""
        number = entry.pages.item(self._allocator, index - entry.first)
        if number:
            self.pool.discard(number)

    def _slot_of(self, pages: Mapping[str, SequencePages]) -> StateSlot:
        holder = pages[self.group.name]
        assert isinstance(holder, StateSlot)
        return holder
