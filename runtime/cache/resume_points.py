"""Of a group with a sliding window, the pages that a later prompt can begin behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from specbuild.runtime.cache.page_pool import PagePool
from specbuild.runtime.errors import SpecbuildError

# The number of an entry of the prefix tree, and the pages in front of the end.
ResumePoint: TypeAlias = tuple[int, int]


class ResumePoints:
    """The ends of beginnings, with the pages of the window in front of each.

    A window's pages serve who begins right behind all of them, so those that no end wants are
    expendable: they go first. So do the others of a window that has lost one.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: dict[ResumePoint, tuple[int, ...]] = {}
        self._points_of_page: dict[int, set[ResumePoint]] = {}

    def add(self, point: ResumePoint, pages: Sequence[int]) -> None:
        """Prompts may go on here, behind these kept pages."""
        if point in self._pages:
            return
        self._pages[point] = tuple(pages)
        for page in pages:
            self._points_of_page.setdefault(page, set()).add(point)
        self._pool.set_eviction(pages, evict_first=False)

    def remove(self, point: ResumePoint) -> None:
        """Nobody goes on here any more, if anybody did."""
        self._pool.set_eviction(self._remove(point), evict_first=True)

    def remove_page(self, page: int) -> None:
        """A page is gone, and with it the ends that wanted it."""
        for point in tuple(self._points_of_page.get(page, ())):
            self._pool.set_eviction([p for p in self._remove(point) if p != page], evict_first=True)

    def _remove(self, point: ResumePoint) -> list[int]:
        """The pages that no end wants once this one is none."""
        unused: list[int] = []
        for page in self._pages.pop(point, ()):
            self._points_of_page[page].remove(point)
            if not self._points_of_page[page]:
                del self._points_of_page[page]
                unused.append(page)
        return unused

    def check_integrity(self) -> None:
        """SpecbuildError unless the pages that are not expendable are those of an end."""
        lasting = self._pool.evict_last_pages
        if lasting != self._points_of_page.keys():
            raise SpecbuildError(
                f"cache group {self._pool.name}: {len(lasting)} pages are to last, the ends of "
                f"beginnings want {len(self._points_of_page)}; please report it"
            )
