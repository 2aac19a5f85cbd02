"""The points at which later prompts can resume in a group with a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from specbuild.runtime.cache.page_pool import PagePool
from specbuild.runtime.errors import SpecbuildError

# The number of a branch of the prefix tree, and the number of pages before the point.
ResumePoint: TypeAlias = tuple[int, int]


class ResumePoints:
    """Resume points in the prefix tree, each with the pages of the window before it.

    A prompt can resume only if all pages of the window are cached. So pages that belong to no
    resume point are evicted first. When a page is evicted, all resume points that need it are
    removed.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: dict[ResumePoint, tuple[int, ...]] = {}
        self._points_of_page: dict[int, set[ResumePoint]] = {}

    def add(self, point: ResumePoint, pages: Sequence[int]) -> None:
        """Add a resume point after these cached pages."""
        if point in self._pages:
            return
        self._pages[point] = tuple(pages)
        for page in pages:
            self._points_of_page.setdefault(page, set()).add(point)
        self._pool.set_eviction(pages, evict_first=False)

    def remove(self, point: ResumePoint) -> None:
        """Remove a resume point, if it exists."""
        self._pool.set_eviction(self._remove(point), evict_first=True)

    def remove_page(self, page: int) -> None:
        """Remove an evicted page and the resume points that need it."""
        for point in tuple(self._points_of_page.get(page, ())):
            self._pool.set_eviction([p for p in self._remove(point) if p != page], evict_first=True)

    def _remove(self, point: ResumePoint) -> list[int]:
        """Remove a resume point; return the pages that no other point needs."""
        unused: list[int] = []
        for page in self._pages.pop(point, ()):
            self._points_of_page[page].remove(point)
            if not self._points_of_page[page]:
                del self._points_of_page[page]
                unused.append(page)
        return unused

    def check_integrity(self) -> None:
        """Raise SpecbuildError unless exactly the pages of resume points are evicted last."""
        evict_last = self._pool.evict_last_pages
        if evict_last != self._points_of_page.keys():
            raise SpecbuildError(
                f"cache group {self._pool.name}: {len(evict_last)} pages are evicted last, but "
                f"resume points need {len(self._points_of_page)}; please report it"
            )
