"""Who holds which page: every page has one owner."""

from __future__ import annotations

from collections.abc import Sequence

from specbuild.runtime.errors import SpecbuildError


class PageLedger:
    """A cookie for every page, for debugging: who gets a page, and who gives it back.

    ``installed`` and ``released`` are the callbacks of :class:`KvPools`; either raises
    SpecbuildError where a page has two owners, or goes back without having had one.
    """

    def __init__(self) -> None:
        self._cookies: dict[tuple[str, int], int] = {}
        self._installs = 0

    @property
    def held(self) -> dict[tuple[str, int], int]:
        """The pages in use, and the number of the install that gave each away."""
        return dict(self._cookies)

    def installed(self, group: str, pages: Sequence[int]) -> None:
        """Pages go to a sequence."""
        for page in pages:
            if page == 0 or (group, page) in self._cookies:
                raise SpecbuildError(f"cache group {group}: page {page} is given away twice")
            self._installs += 1
            self._cookies[group, page] = self._installs

    def released(self, group: str, pages: Sequence[int]) -> None:
        """Pages come back."""
        for page in pages:
            if self._cookies.pop((group, page), None) is None:
                raise SpecbuildError(f"cache group {group}: page {page} comes back, but was free")
