"""The owners of all pages: every page has one owner."""

from __future__ import annotations

from collections.abc import Sequence

from specbuild.runtime.errors import SpecbuildError


class PageLedger:
    """Records the owner of every page, for debugging.

    ``installed`` and ``released`` are the callbacks of :class:`KvPools`. They raise SpecbuildError
    if a page has two owners, or is released without an owner.
    """

    def __init__(self) -> None:
        self._cookies: dict[tuple[str, int], int] = {}
        self._installs = 0

    @property
    def held(self) -> dict[tuple[str, int], int]:
        """The pages in use, and the number of the install that allocated each."""
        return dict(self._cookies)

    def installed(self, group: str, pages: Sequence[int]) -> None:
        """Record pages that a sequence gets."""
        for page in pages:
            if page == 0 or (group, page) in self._cookies:
                raise SpecbuildError(f"cache group {group}: page {page} is given away twice")
            self._installs += 1
            self._cookies[group, page] = self._installs

    def released(self, group: str, pages: Sequence[int]) -> None:
        """Record pages that are released."""
        for page in pages:
            if self._cookies.pop((group, page), None) is None:
                raise SpecbuildError(f"cache group {group}: page {page} comes back, but was free")
