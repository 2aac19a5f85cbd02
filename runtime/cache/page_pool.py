"""The pages of one allocator: free, held by sequences, or kept for who begins alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specbuild.runtime.cache.page_trace import PageTrace
from specbuild.runtime.errors import SpecbuildError

# Is called with pages of a group when they come into use, and when nobody has a use for them.
PagesInstalled = Callable[[str, Sequence[int]], None]
PagesReleased = Callable[[str, Sequence[int]], None]
# Is called with a kept page whose place another one takes.
OnEvict = Callable[[int], None]
# The pages that continue a kept page: of no use to anybody who does not have it.
ChildPages = Callable[[int], Sequence[int]]

# What becomes of a page that nobody holds any more.
_NOT_CACHED, _EVICT_FIRST, _EVICT_LAST = range(3)


@dataclass(frozen=True)
class SharedPages:
    """Kept pages of one allocator that a sequence begins with: logical pages from ``first`` on."""

    first: int
    pages: tuple[int, ...]


class PagePool:
    """The pages of one group. Page 0 is never handed out.

    ``reserve`` promises pages to a sequence before it takes any, so that what was admitted
    never has to wait. A promise covers the pages that its sequence took itself.

    A page is held by those that took or shared it. One that is to :meth:`keep` stays where it is
    when nobody holds it any more, until :meth:`share` takes it up again or a page is wanted and
    none is free: then the one goes that was let go of first, of those that are expendable while
    there are any. One that others continue, which nobody holds either, stays as long as they do.

    ``trace``, where there is one, is told who holds which page. An ``owner`` is the cookie under
    which a sequence was admitted.
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
        # Holders of a page beside the first.
        self._extra_holders: dict[int, int] = {}
        # Held pages that no promise covers.
        self._reserved_by_pool: set[int] = set()
        # By page, what becomes of it.
        self._retention = bytearray(pages)
        self._retention_array = np.frombuffer(self._retention, np.uint8)
        # The pages that nobody holds, by their fate, in the order in which they were let go of.
        self._cached: dict[int, OrderedDict[int, None]] = {
            _EVICT_FIRST: OrderedDict(),
            _EVICT_LAST: OrderedDict(),
        }

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free) + self.cached_pages

    @property
    def cached_pages(self) -> int:
        """Pages that no sequence holds, and that are as they were left."""
        return sum(map(len, self._cached.values()))

    @property
    def evict_last_pages(self) -> set[int]:
        """Pages to keep that are not expendable, held or not."""
        return set(np.flatnonzero(self._retention_array == _EVICT_LAST).tolist())

    def can_reserve(self, pages: int) -> bool:
        """Whether this many pages are promised to nobody."""
        return pages <= self._unreserved

    def check_reserve(self, pages: int) -> None:
        """SpecbuildError where :meth:`can_reserve` is false."""
        if not self.can_reserve(pages):
            raise SpecbuildError(
                f"cache group {self.name}: {pages} pages wanted, {self._unreserved} left; "
                "run fewer or shorter sequences"
            )

    def reserve(self, pages: int) -> None:
        """Promises pages; SpecbuildError where :meth:`can_reserve` is false."""
        self.check_reserve(pages)
        self._unreserved -= pages

    def unreserve(self, pages: int) -> None:
        """Takes a promise back."""
        self._unreserved += pages

    def allocate(self, owner: int) -> int:
        """One page, whose content is nobody's."""
        if not self._free:
            self._evict()
        page = self._free.pop()
        if self._installed is not None:
            self._installed(self.name, (page,))
        self._trace_event("install", owner, (page,))
        return page

    def cache(self, pages: np.ndarray, *, evict_first: bool = False) -> None:
        """Held pages are to stay as they are when they are let go of."""
        self._retention_array[pages] = _EVICT_FIRST if evict_first else _EVICT_LAST

    def set_eviction(self, pages: Iterable[int], *, evict_first: bool) -> None:
        """Pages to keep become expendable, and then the first to go; or are so no more."""
        retention = _EVICT_FIRST if evict_first else _EVICT_LAST
        for page in pages:
            before, self._retention[page] = self._retention[page], retention
            if before != retention and page in self._cached[before]:
                del self._cached[before][page]
                self._cached[retention][page] = None
                self._cached[retention].move_to_end(page, last=not evict_first)

    def count_unheld(self, pages: Iterable[int]) -> int:
        """How many of these kept pages nobody holds."""
        return sum(page in self._cached[self._retention[page]] for page in pages)

    def share(self, pages: Sequence[int], owner: int, *, is_reserved: bool) -> None:
        """One more holder of each of these pages, which are kept.

        ``covered``: its own promise counts them. Else those that nobody held count as promised
        until they are let go of; SpecbuildError where too few are left.
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
        """Whose promise covered these pages is gone: those that others hold stay promised."""
        held = [page for page in pages if page in self._extra_holders]
        self._unreserved -= len(held)
        self._reserved_by_pool.update(held)

    def release(self, pages: Sequence[int], owner: int) -> None:
        """A holder lets go of each of these pages."""
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
        """SpecbuildError unless every page is free or kept, and promised to nobody."""
        if self.free_pages != self.pages or self._unreserved != self.pages:
            raise SpecbuildError(
                f"cache group {self.name}: idle, but {len(self._free)} pages are free and "
                f"{self.cached_pages} kept of {self.pages}, and {self._unreserved} not promised; "
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
