"""Of a group with a sliding window, the pages that a later prompt can begin behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from specbuild.runtime.cache.page_pool import PagePool
from specbuild.runtime.errors import SpecbuildError

# The number of an entry of the prefix tree, and the pages in front of the end.
WindowEnd: TypeAlias = tuple[int, int]


class WindowEnds:
    """The ends of beginnings, with the pages of the window in front of each.

    A window's pages serve who begins right behind all of them, so those that no end wants are
    expendable: they go first. So do the others of a window that has lost one.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: dict[WindowEnd, tuple[int, ...]] = {}
        self._ends: dict[int, set[WindowEnd]] = {}

    def add(self, end: WindowEnd, pages: Sequence[int]) -> None:
        """Prompts may go on here, behind these kept pages."""
        if end in self._pages:
            return
        self._pages[end] = tuple(pages)
        for page in pages:
            self._ends.setdefault(page, set()).add(end)
        self._pool.mark(pages, expendable=False)

    def drop(self, end: WindowEnd) -> None:
        """Nobody goes on here any more, if anybody did."""
        self._pool.mark(self._unwanted(end), expendable=True)

    def forget(self, page: int) -> None:
        """A page is gone, and with it the ends that wanted it."""
        for end in tuple(self._ends.get(page, ())):
            self._pool.mark([p for p in self._unwanted(end) if p != page], expendable=True)

    def _unwanted(self, end: WindowEnd) -> list[int]:
        """The pages that no end wants once this one is none."""
        unwanted: list[int] = []
        for page in self._pages.pop(end, ()):
            self._ends[page].remove(end)
            if not self._ends[page]:
                del self._ends[page]
                unwanted.append(page)
        return unwanted

    def check_integrity(self) -> None:
        """SpecbuildError unless the pages that are not expendable are those of an end."""
        lasting = self._pool.lasting_pages
        if lasting != self._ends.keys():
            raise SpecbuildError(
                f"cache group {self._pool.name}: {len(lasting)} pages are to last, the ends of "
                f"beginnings want {len(self._ends)}; please report it"
            )
