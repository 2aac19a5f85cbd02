"""The page pools of an engine: admits, grows and releases the pages of sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specbuild.runtime.cache.page_pool import (
    PagePool,
    PagesInstalled,
    PagesReleased,
    SharedPages,
)
from specbuild.runtime.cache.page_trace import TRACE_VERSION, PageTrace
from specbuild.runtime.cache.sequence_pages import (
    AheadPages,
    FixedPages,
    RingPages,
    SequencePages,
)
from specbuild.runtime.cache.state_paths import StateSlot
from specbuild.runtime.engine_dir.cache_groups import (
    allocators,
    group_pages,
    slots_per_sequence,
    tree_slots,
)
from specbuild.runtime.engine_dir.manifest import CacheGroup, Limits, StateGroup


class KvPools:
    """The page pools by group name. Groups that share an allocator share a pool.

    Of a group of recurrent states a sequence holds one slot from admission to release.

    ``ahead``: launches are queued before earlier ones complete. ``fixed``: a sequence allocates all
    reserved pages at admission and keeps them, so its table does not change.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup | StateGroup],
        limits: Limits,
        released: PagesReleased | None = None,
        installed: PagesInstalled | None = None,
        *,
        ahead: bool = False,
        fixed: bool = False,
    ) -> None:
        paged = [group for group in groups if isinstance(group, CacheGroup)]
        states = [group for group in groups if isinstance(group, StateGroup)]
        self._groups = {group.name: group for group in paged}
        self._limits = limits
        self._ahead, self._fixed = ahead, fixed
        self._shared = allocators(paged)
        self._trace: PageTrace | None = None
        self._admitted = 0
        self.pools: dict[str, PagePool] = {}
        for first, names in self._shared.items():
            pool = PagePool(
                first,
                self._groups[first].pages,
                _notify_each_group(names, released),
                _notify_each_group(names, installed),
            )
            self.pools |= dict.fromkeys(names, pool)
        # The last slot takes states that nobody reads, so no sequence gets it.
        self._states = tuple(group.name for group in states)
        self.pools |= {group.name: PagePool(group.name, group.slots - 1) for group in states}

    @property
    def used_share(self) -> float:
        """The share of pages in use, in the fullest group: 0 to 1."""
        return max(
            1 - self.pools[name].free_pages / max(group.pages - 1, 1)
            for name, group in self._groups.items()
        )

    @property
    def trace(self) -> PageTrace | None:
        """The trace of all pages. Set it only while no page is held."""
        return self._trace

    @trace.setter
    def trace(self, trace: PageTrace | None) -> None:
        self._trace = trace
        allocating = (*self._shared, *self._states)
        for name in allocating:
            self.pools[name].trace = trace
        if trace is not None:
            pages = {name: self.pools[name].free_pages for name in allocating}
            trace.add("start", version=TRACE_VERSION, pages=pages)

    def pages_needed(self, tokens: int, *, initial_tokens: int | None = None) -> dict[str, int]:
        """Return the pages to reserve, by group, for a sequence of up to ``tokens`` tokens.

        Of groups that share an allocator, only the first is listed. Groups without a window start
        with pages for ``initial_tokens`` tokens, if given.
        """
        growing_tokens = tokens if initial_tokens is None else min(tokens, initial_tokens)
        pages = {
            name: group_pages(
                group, self._limits, tokens=tokens if group.window else growing_tokens
            )
            for name in self._shared
            for group in (self._groups[name],)
        }
        return pages | dict.fromkeys(self._states, 1)

    def can_grow(self, pages: Mapping[str, SequencePages], tokens: int) -> bool:
        """Return whether the missing pages for ``tokens`` tokens and a tree are unreserved."""
        return self.can_admit(self._missing_pages(pages, tokens))

    def grow(self, pages: Mapping[str, SequencePages], tokens: int) -> None:
        """Reserve the missing pages; SpecbuildError if :meth:`can_grow` is false."""
        for name, count in self._missing_pages(pages, tokens).items():
            pages[name].reserve(count)

    def _missing_pages(self, pages: Mapping[str, SequencePages], tokens: int) -> dict[str, int]:
        return {
            name: needed - pages[name].reserved - pages[name].shared
            for name, needed in self.pages_needed(tokens).items()
            if needed > pages[name].reserved + pages[name].shared
        }

    def capacity(self, pages: Mapping[str, SequencePages]) -> int:
        """Return the number of tokens that the sequence's reserved pages hold."""
        grow = (name for name, group in self._groups.items() if not group.window)
        return min(
            (
                (pages[name].reserved + pages[name].shared) * pages[name].page_size
                - tree_slots(name, self._limits)
                for name in grow
            ),
            default=self._limits.max_seq_len,
        )

    def can_admit(self, needed: Mapping[str, int], *, margin: int = 0) -> bool:
        """Return whether the pages, and in groups without a window ``margin`` more, are free."""
        return all(
            self.pools[name].can_reserve(pages + (margin if self._grows(name) else 0))
            for name, pages in needed.items()
        )

    def _grows(self, name: str) -> bool:
        """Return whether sequences hold more pages of this allocator the longer they are."""
        return name not in self._states and not self._groups[name].window

    def pages_to_reserve(
        self, needed: Mapping[str, int], shared: Mapping[str, SharedPages]
    ) -> dict[str, int]:
        """Return the pages to reserve for a sequence that starts with ``shared`` pages."""
        to_reserve = dict(needed)
        for name, prefix_pages in shared.items():
            if self._grows(name):
                unheld = self.pools[name].count_unheld(prefix_pages.pages)
                to_reserve[name] += unheld - len(prefix_pages.pages)
        return to_reserve

    def admit(
        self,
        needed: Mapping[str, int],
        shared: Mapping[str, SharedPages] | None = None,
        *,
        request: str | None = None,
    ) -> dict[str, SequencePages]:
        """Reserve pages; return the sequence's pages by group, already allocated if ``fixed``.

        ``shared`` pages, by allocator, replace the first needed ones. Groups that share an
        allocator get the same object. The trace records the id ``request``; None is a measurement.
        Raises SpecbuildError if a group has too few pages, before any are reserved.
        """
        shared = shared or {}
        for name, pages in self.pages_to_reserve(needed, shared).items():
            self.pools[name].check_reserve(pages)
        self._admitted += 1
        if self._trace is not None:
            self._trace.add("admit", owner=self._admitted, request=request, promised=dict(needed))
        holders: dict[str, SequencePages] = {}
        for name, pages in needed.items():
            if name in self._states:
                snapshot = shared[name].pages[0] if name in shared else None
                holders[name] = StateSlot(self.pools[name], owner=self._admitted, snapshot=snapshot)
                continue
            prefix_pages = shared.get(name)
            held = (
                0 if prefix_pages is None or self._groups[name].window else len(prefix_pages.pages)
            )
            holder = self._holder(name, pages - held)
            if prefix_pages is not None:
                holder.adopt(prefix_pages)
            holders |= dict.fromkeys(self._shared[name], holder)
        return {name: holders[name] for name in (*self._groups, *self._states)}

    def _holder(self, name: str, pages: int) -> SequencePages:
        group = self._groups[name]
        kind: type[SequencePages] = AheadPages if self._ahead else SequencePages
        if self._fixed:
            kind = RingPages if group.window else FixedPages
        return kind(
            self.pools[name],
            page_size=group.page_size,
            window=group.window,
            capacity=slots_per_sequence(self._limits),
            reserved=pages,
            owner=self._admitted,
        )

    def release(self, pages: Mapping[str, SequencePages]) -> None:
        """Release the pages of a sequence and cancel its reservations."""
        for name in (*self._shared, *self._states):
            pages[name].release()


def _notify_each_group(
    names: Sequence[str], call: Callable[[str, Sequence[int]], None] | None
) -> Callable[[str, Sequence[int]], None] | None:
    """Return a callback for an allocator that calls ``call`` with each of its groups."""
    if call is None:
        return None

    def notify(_first: str, pages: Sequence[int]) -> None:
        for name in names:
            call(name, pages)

    return notify
