"""The free pages of one cache group, and the promises of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specbuild.runtime.cache.page_trace import PageTrace
from specbuild.runtime.errors import SpecbuildError

# Is called with pages of a group when a sequence gets them, and when it gives them back.
PagesInstalled = Callable[[str, Sequence[int]], None]
PagesReleased = Callable[[str, Sequence[int]], None]


class PagePool:
    """The free pages of one group. Page 0 is never handed out.

    ``reserve`` promises pages to a sequence before it takes any, so that what was admitted
    never has to wait. ``trace``, where there is one, is told of every page.
    """

    def __init__(
        self,
        name: str,
        pages: int,
        released: PagesReleased | None = None,
        installed: PagesInstalled | None = None,
    ) -> None:
        self.name = name
        self._free = list(range(pages - 1, 0, -1))
        self._unreserved = pages - 1
        self._released = released
        self._installed = installed
        self.trace: PageTrace | None = None

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

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
        """One page for a sequence: the cookie under which it was admitted."""
        if not self._free:
            raise SpecbuildError(f"cache group {self.name}: no free page; run fewer sequences")
        page = self._free.pop()
        if self._installed is not None:
            self._installed(self.name, (page,))
        if self.trace is not None:
            self._tell("install", owner, (page,))
        return page

    def release(self, pages: Sequence[int], owner: int) -> None:
        """Pages go back."""
        self._free.extend(pages)
        if self._released is not None:
            self._released(self.name, pages)
        if self.trace is not None and pages:
            self._tell("release", owner, pages)

    def _tell(self, event: str, owner: int, pages: Sequence[int]) -> None:
        assert self.trace is not None
        self.trace.add(event, owner=owner, group=self.name, pages=pages, free=len(self._free))
