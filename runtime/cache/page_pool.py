"""The pages of one allocator: free, held by sequences, or cached for shared prefixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specbuild.runtime.cache.page_trace import PageTrace
from specbuild.runtime.errors import SpecbuildError

# Called with pages of a group when they are allocated, and when they become free.
PagesInstalled = Callable[[str, Sequence[int]], None]
PagesReleased = Callable[[str, Sequence[int]], None]
# Called with a cached page when it is evicted.
OnEvict = Callable[[int], None]
# Returns the pages that follow a cached page in the prefix tree. A prompt cannot use them without
# it.
ChildPages = Callable[[int], Sequence[int]]

# What happens to a page when no sequence holds it any more.
_NOT_CACHED, _EVICT_FIRST, _EVICT_LAST = range(3)


@dataclass(frozen=True)
class SharedPages:
    """Cached pages that a sequence starts with: logical pages from ``first`` on."""

    first: int
    pages: tuple[int, ...]


class PagePool:
    """The pages of one group. Page 0 is never allocated.

    ``reserve`` reserves pages for a sequence before it allocates any, so that an admitted sequence
    never waits. A reservation covers the pages that its sequence allocates itself.

    A page is held by the sequences that allocated or shared it. After :meth:`cache` it keeps its
    content when no sequence holds it. It stays until :meth:`share` reuses it, or until it is
    evicted because no page is free. Evict-first pages are evicted before the other cached pages. Of
    each kind, the least recently released page is evicted first, and children before parents.

    ``trace`` records who holds which page. An ``owner`` is the number of an admitted sequence.
    """

    def __init__(
        self,
        name: str,
        pages: int,
        released: PagesReleased | None = None,
        installed: PagesInstalled | None = None,
    ) -> None:
        self.name = name
        self.pages = pages - 1
        self.on_evict: OnEvict | None = None
        self.children: ChildPages | None = None
        self.trace: PageTrace | None = None
        self._free = list(range(pages - 1, 0, -1))
        self._unreserved = pages - 1
        self._released = released
        self._installed = installed
        # Number of holders of a page besides the first.
        self._extra_holders: dict[int, int] = {}
        # Held pages that no sequence's reservation covers.
        self._reserved_by_pool: set[int] = set()
        # By page: what happens to it when it is released, one of the constants above.
        self._retention = bytearray(pages)
        self._retention_array = np.frombuffer(self._retention, np.uint8)
        # Cached pages without a holder, by retention, least recently released first.
        self._cached: dict[int, OrderedDict[int, None]] = {
            _EVICT_FIRST: OrderedDict(),
            _EVICT_LAST: OrderedDict(),
        }

    @property
    def free_pages(self) -> int:
        """Number of pages that no sequence holds, including cached ones."""
        return len(self._free) + self.cached_pages

    @property
    def cached_pages(self) -> int:
        """Number of cached pages that no sequence holds."""
        return sum(map(len, self._cached.values()))

    @property
    def evict_last_pages(self) -> set[int]:
        """The cached pages that are not evict-first, held or not."""
        return set(np.flatnonzero(self._retention_array == _EVICT_LAST).tolist())

    def can_reserve(self, pages: int) -> bool:
        """Return whether at least this many pages are unreserved."""
        return pages <= self._unreserved

    def check_reserve(self, pages: int) -> None:
        """Raise SpecbuildError if :meth:`can_reserve` is false."""
        if not self.can_reserve(pages):
            raise SpecbuildError(
                f"cache group {self.name}: {pages} pages requested, {self._unreserved} left; "
                "run fewer or shorter sequences"
            )

    def reserve(self, pages: int) -> None:
        """Reserve pages; SpecbuildError if :meth:`can_reserve` is false."""
        self.check_reserve(pages)
        self._unreserved -= pages

    def unreserve(self, pages: int) -> None:
        """Cancel a reservation."""
        self._unreserved += pages

    def allocate(self, owner: int) -> int:
        """Return a page with undefined content."""
        if not self._free:
            self._evict()
        page = self._free.pop()
        if self._installed is not None:
            self._installed(self.name, (page,))
        self._trace_event("install", owner, (page,))
        return page

    def cache(self, pages: np.ndarray, *, evict_first: bool = False) -> None:
        """Let held pages keep their content when they are released."""
        self._retention_array[pages] = _EVICT_FIRST if evict_first else _EVICT_LAST

    def set_eviction(self, pages: Iterable[int], *, evict_first: bool) -> None:
        """Make cached pages evict-first, before all others, or evict-last, after all others."""
        retention = _EVICT_FIRST if evict_first else _EVICT_LAST
        for page in pages:
            before, self._retention[page] = self._retention[page], retention
            if before != retention and page in self._cached[before]:
                del self._cached[before][page]
                self._cached[retention][page] = None
                self._cached[retention].move_to_end(page, last=not evict_first)

    def discard(self, page: int) -> None:
        """Evict a cached page that no sequence holds, before its turn."""
        del self._cached[self._retention[page]][page]
        self._drop(page)

    def count_unheld(self, pages: Iterable[int]) -> int:
        """Return how many of these cached pages no sequence holds."""
        return sum(page in self._cached[self._retention[page]] for page in pages)

    def share(self, pages: Sequence[int], owner: int, *, is_reserved: bool) -> None:
        """Add a holder to each of these cached pages.

        ``is_reserved``: the holder's own reservation covers them. Otherwise the pool reserves the
        pages that no sequence held, until they are released. SpecbuildError if too few are left.
        """
        unheld = [page for page in pages if page in self._cached[self._retention[page]]]
        if not is_reserved:
            self.reserve(len(unheld))
            self._reserved_by_pool.update(unheld)
        for page in unheld:
            del self._cached[self._retention[page]][page]
        for page in set(pages).difference(unheld):
            self._extra_holders[page] = self._extra_holders.get(page, 0) + 1
        self._trace_event("share", owner, pages)

    def transfer_reservation(self, pages: Iterable[int]) -> None:
        """Reserve, for the pool, the pages of an ending reservation that other sequences hold."""
        held = [page for page in pages if page in self._extra_holders]
        self._unreserved -= len(held)
        self._reserved_by_pool.update(held)

    def release(self, pages: Sequence[int], owner: int) -> None:
        """Remove a holder from each of these pages."""
        uncached: list[int] = []
        for page in pages:
            sharers = self._extra_holders.get(page, 0)
            if sharers > 1:
                self._extra_holders[page] = sharers - 1
            elif sharers:
                del self._extra_holders[page]
            else:
                if page in self._reserved_by_pool:
                    self._reserved_by_pool.remove(page)
                    self._unreserved += 1
                if (retention := self._retention[page]) == _NOT_CACHED:
                    uncached.append(page)
                else:
                    self._cached[retention][page] = None
        self._free_pages(uncached)
        self._trace_event("release", owner, pages)

    def check_integrity(self) -> None:
        """Raise SpecbuildError unless every page is free or cached, and none is reserved."""
        if self.free_pages != self.pages or self._unreserved != self.pages:
            raise SpecbuildError(
                f"cache group {self.name}: idle, but {len(self._free)} pages are free and "
                f"{self.cached_pages} cached of {self.pages}, and {self._unreserved} not reserved; "
                "please report it"
            )

    def _evict(self) -> None:
        candidates = self._cached[_EVICT_FIRST] or self._cached[_EVICT_LAST]
        if not candidates:
            raise SpecbuildError(f"cache group {self.name}: no free page; run fewer sequences")
        if self.children is not None:
            while (children_of_page := self.children(next(iter(candidates)))) and self.count_unheld(
                children_of_page
            ):
                candidates.move_to_end(next(iter(candidates)))
        page, _ = candidates.popitem(last=False)
        self._drop(page)

    def _drop(self, page: int) -> None:
        """Free a page that was cached."""
        self._retention[page] = _NOT_CACHED
        if self.on_evict is not None:
            self.on_evict(page)
        self._free_pages((page,))

    def _trace_event(self, event: str, owner: int, pages: Sequence[int]) -> None:
        if self.trace is not None and pages:
            self.trace.add(event, owner=owner, group=self.name, pages=pages, free=self.free_pages)

    def _free_pages(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)
        if self._released is not None and pages:
            self._released(self.name, pages)
