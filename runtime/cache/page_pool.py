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
Evicted = Callable[[int], None]
# The pages that continue a kept page: of no use to anybody who does not have it.
Continued = Callable[[int], Sequence[int]]

# What becomes of a page that nobody holds any more.
_FREE, _EXPENDABLE, _LASTING = range(3)


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
        self.evicted: Evicted | None = None
        self.continued: Continued | None = None
        self.trace: PageTrace | None = None
        self._free = list(range(pages - 1, 0, -1))
        self._unreserved = pages - 1
        self._released = released
        self._installed = installed
        # Holders of a page beside the first.
        self._sharers: dict[int, int] = {}
        # Held pages that no promise covers.
        self._uncovered: set[int] = set()
        # By page, what becomes of it.
        self._fate = bytearray(pages)
        self._fates = np.frombuffer(self._fate, np.uint8)
        # The pages that nobody holds, by their fate, in the order in which they were let go of.
        self._kept: dict[int, OrderedDict[int, None]] = {
            _EXPENDABLE: OrderedDict(),
            _LASTING: OrderedDict(),
        }

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free) + self.kept_pages

    @property
    def kept_pages(self) -> int:
        """Pages that no sequence holds, and that are as they were left."""
        return sum(map(len, self._kept.values()))

    @property
    def lasting_pages(self) -> set[int]:
        """Pages to keep that are not expendable, held or not."""
        return set(np.flatnonzero(self._fates == _LASTING).tolist())

    def can_reserve(self, pages: int) -> bool:
        """Whether this many pages are promised to nobody."""
        return pages <= self._unreserved

    def require(self, pages: int) -> None:
        """SpecbuildError where :meth:`can_reserve` is false."""
        if not self.can_reserve(pages):
            raise SpecbuildError(
                f"cache group {self.name}: {pages} pages wanted, {self._unreserved} left; "
                "run fewer or shorter sequences"
            )

    def reserve(self, pages: int) -> None:
        """Promises pages; SpecbuildError where :meth:`can_reserve` is false."""
        self.require(pages)
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
        self._tell("install", owner, (page,))
        return page

    def keep(self, pages: np.ndarray, *, expendable: bool = False) -> None:
        """Held pages are to stay as they are when they are let go of."""
        self._fates[pages] = _EXPENDABLE if expendable else _LASTING

    def mark(self, pages: Iterable[int], *, expendable: bool) -> None:
        """Pages to keep become expendable, and then the first to go; or are so no more."""
        fate = _EXPENDABLE if expendable else _LASTING
        for page in pages:
            before, self._fate[page] = self._fate[page], fate
            if before != fate and page in self._kept[before]:
                del self._kept[before][page]
                self._kept[fate][page] = None
                self._kept[fate].move_to_end(page, last=not expendable)

    def not_held(self, pages: Iterable[int]) -> int:
        """How many of these kept pages nobody holds."""
        return sum(page in self._kept[self._fate[page]] for page in pages)

    def share(self, pages: Sequence[int], owner: int, *, covered: bool) -> None:
        """One more holder of each of these pages, which are kept.

        ``covered``: its own promise counts them. Else those that nobody held count as promised
        until they are let go of; SpecbuildError where too few are left.
        """
        idle = [page for page in pages if page in self._kept[self._fate[page]]]
        if not covered:
            self.reserve(len(idle))
            self._uncovered.update(idle)
        for page in idle:
            del self._kept[self._fate[page]][page]
        for page in set(pages).difference(idle):
            self._sharers[page] = self._sharers.get(page, 0) + 1
        self._tell("share", owner, pages)

    def uncover(self, pages: Iterable[int]) -> None:
        """Whose promise covered these pages is gone: those that others hold stay promised."""
        held = [page for page in pages if page in self._sharers]
        self._unreserved -= len(held)
        self._uncovered.update(held)

    def release(self, pages: Sequence[int], owner: int) -> None:
        """A holder lets go of each of these pages."""
        freed: list[int] = []
        for page in pages:
            sharers = self._sharers.get(page, 0)
            if sharers > 1:
                self._sharers[page] = sharers - 1
            elif sharers:
                del self._sharers[page]
            else:
                if page in self._uncovered:
                    self._uncovered.remove(page)
                    self._unreserved += 1
                if (fate := self._fate[page]) == _FREE:
                    freed.append(page)
                else:
                    self._kept[fate][page] = None
        self._to_free(freed)
        self._tell("release", owner, pages)

    def check_integrity(self) -> None:
        """SpecbuildError unless every page is free or kept, and promised to nobody."""
        if self.free_pages != self.pages or self._unreserved != self.pages:
            raise SpecbuildError(
                f"cache group {self.name}: idle, but {len(self._free)} pages are free and "
                f"{self.kept_pages} kept of {self.pages}, and {self._unreserved} not promised; "
                "please report it"
            )

    def _evict(self) -> None:
        kept = self._kept[_EXPENDABLE] or self._kept[_LASTING]
        if not kept:
            raise SpecbuildError(f"cache group {self.name}: no free page; run fewer sequences")
        if self.continued is not None:
            while (behind := self.continued(next(iter(kept)))) and self.not_held(behind):
                kept.move_to_end(next(iter(kept)))
        page, _ = kept.popitem(last=False)
        self._fate[page] = _FREE
        if self.evicted is not None:
            self.evicted(page)
        self._to_free((page,))

    def _tell(self, event: str, owner: int, pages: Sequence[int]) -> None:
        if self.trace is not None and pages:
            self.trace.add(event, owner=owner, group=self.name, pages=pages, free=self.free_pages)

    def _to_free(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)
        if self._released is not None and pages:
            self._released(self.name, pages)
