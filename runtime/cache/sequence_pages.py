"""The pages of one sequence in one cache group: which it holds, and when they go back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.runtime.cache.page_pool import PagePool, SharedPages
from specbuild.runtime.errors import SpecbuildError

# Pages that are taken beyond those wanted: a table on a device changes that much more seldom.
_EXTRA_PAGES = 4


class SequencePages:
    """One sequence's pages in one group, or in several that share an allocator.

    It holds no more pages at once than the ``reserved`` ones that its pool promised it, and the
    first ``shared`` ones, which others made.

    Logical page p holds slots ``p·page_size …``. Pages ``first_page … end_page − 1`` are held:
    those before the window are given back, those past ``length`` exist only between
    :meth:`append` and :meth:`commit`. ``table[p]`` is the page (0 = none), ``slots[x]`` where
    slot x lies in the pool (valid for held pages), ``page_positions[p]`` the position of slot
    ``p·page_size``. ``owner`` is the cookie of its pages.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        page_size: int,
        window: int,
        capacity: int,
        reserved: int,
        owner: int = 0,
    ) -> None:
        pool.reserve(reserved)
        logical = -(-capacity // page_size)
        self.owner = owner
        self.reserved = reserved
        self.shared = 0
        self.page_size = page_size
        self.window = window
        self.length = 0
        self.first_page = 0
        self.end_page = 0
        self.table = np.zeros(logical, np.int32)
        self.slots = np.zeros(logical * page_size, np.int32)
        self._oldest_row = 0
        self.page_positions = np.arange(logical, dtype=np.int32) * np.int32(page_size)
        self._pool = pool
        self._offsets = np.arange(page_size, dtype=np.int32)

    def append(self, count: int) -> None:
        """Makes capacity for ``count`` slots after the committed length."""
        if self.length + count > len(self.slots):
            raise SpecbuildError(
                f"cache group {self._pool.name}: a sequence holds {len(self.slots)} slots, "
                f"{self.length + count} wanted; use fewer tokens"
            )
        self._allocate_to(-(-(self.length + count) // self.page_size))

    def _allocate_to(self, end: int) -> None:
        """Holds pages up to ``end``."""
        if end - self.first_page > self.reserved + self.shared:
            raise SpecbuildError(
                f"cache group {self._pool.name}: {end - self.first_page} pages wanted, "
                f"{self.reserved} reserved; use fewer tokens"
            )
        if end > self.end_page:
            new_pages = [self._pool.allocate(self.owner) for _ in range(self.end_page, end)]
            self._set_pages(self.end_page, new_pages)
            self.end_page = end

    def adopt(self, shared: SharedPages) -> None:
        """The sequence begins behind pages that others made and that it never writes.

        Before anything else is held. Where a window's pages go back while the sequence lives, its
        promise counts these too; else they need none.
        """
        self._pool.share(shared.pages, self.owner, is_reserved=self.window > 0)
        self._set_pages(shared.first, shared.pages)
        self.first_page, self.end_page = shared.first, shared.first + len(shared.pages)
        self.length = self._oldest_row = self.end_page * self.page_size
        self.shared = 0 if self.window else len(shared.pages)

    def reserve(self, pages: int) -> None:
        """More pages are promised; SpecbuildError where the pool has too few."""
        self._pool.reserve(pages)
        self.reserved += pages

    def commit(self, length: int, *, reverified: int | None = None) -> None:
        """The first ``length`` slots are the sequence; pages that it has no use for go back.

        Rows from ``reverified`` on may be re-verified, and keep their windows.
        """
        if not self.length <= length <= self.end_page * self.page_size:
            raise SpecbuildError(
                f"cache group {self._pool.name}: commit of {length} slots after {self.length}, "
                f"with capacity for {self.end_page * self.page_size}"
            )
        self.length = length
        self._oldest_row = length if reverified is None else min(length, reverified)
        self._free_unused()

    def rewind(self, length: int) -> None:
        """Forgets what lies past ``length``; SpecbuildError if its window is gone already."""
        if not 0 <= length <= self.length or self._window_page(length) < self.first_page:
            raise SpecbuildError(
                f"cache group {self._pool.name}: cannot rewind from {self.length} to {length}: "
                "the pages of that window were given back"
            )
        self.length = length
        self._oldest_row = min(self._oldest_row, length)
        self._free_unused()

    def release(self) -> None:
        """Every page goes back, and the promise of them."""
        if not self.window:
            self._pool.transfer_reservation(self.table[self.shared : self.end_page].tolist())
        self._release(self.first_page, self.end_page)
        self._pool.unreserve(self.reserved)
        self.reserved = self.shared = 0
        self.length = self.first_page = self.end_page = self._oldest_row = 0

    def view_page(self, position: int) -> int:
        """The first held page that a row at this position, or any behind it, sees."""
        return max(self.first_page, self._window_page(position))

    def _window_page(self, length: int) -> int:
        """The first page that the token at position ``length`` sees."""
        return max(0, length - self.window + 1) // self.page_size if self.window else 0

    def _free_unused(self) -> None:
        end = -(-self.length // self.page_size)
        if end < self.end_page:
            self._release(end, self.end_page)
            self.end_page = end
        self._free_before_window()

    def _free_before_window(self) -> None:
        """What no row sees any more."""
        if self.window:
            first = min(self._window_page(self._oldest_row), self.end_page)
            if first > self.first_page:
                self._release(self.first_page, first)
                self.first_page = first

    def _set_pages(self, first: int, pages: Sequence[int]) -> None:
        """The pages stand from logical page ``first`` on."""
        end = first + len(pages)
        self.table[first:end] = pages
        slots = self.slots.reshape(-1, self.page_size)
        slots[first:end] = self.table[first:end, None] * self.page_size + self._offsets

    def _release(self, first: int, end: int) -> None:
        """The last pages go first: of what is kept, they are the first that others replace."""
        if end > first:
            self._pool.release(self.table[first:end][::-1].tolist(), self.owner)
            self.table[first:end] = 0


class AheadPages(SequencePages):
    """Pages of launches that are queued before those in front of them are through.

    :meth:`reach` takes what the next one may write. Launches in flight may write behind the
    committed length, so only what lies before a window goes back. All launches run in the order in
    which they are queued: a page may have another owner at once, whose launches come later.
    """

    def ensure(self, end: int) -> bool:
        """Makes capacity for the first ``end`` slots; whether the table changed.

        A few pages more are taken where they are promised.
        """
        end_page = -(-end // self.page_size)
        if end_page <= self.end_page:
            return False
        max_end = min(self.first_page + self.reserved + self.shared, len(self.table))
        self._allocate_to(max(end_page, min(end_page + _EXTRA_PAGES, max_end)))
        return True

    def _free_unused(self) -> None:
        self._free_before_window()


class FixedPages(SequencePages):
    """Pages that stay until the end, and that are taken at once: tables do not change."""

    def __init__(self, pool: PagePool, **sizes: int) -> None:
        super().__init__(pool, **sizes)
        self.append(self.reserved * self.page_size)

    def reserve(self, pages: int) -> None:
        """More pages are taken: the table grows."""
        super().reserve(pages)
        self.append(self.reserved * self.page_size - self.length)

    def _free_unused(self) -> None:
        """Nothing goes back before the end."""


class RingPages(SequencePages):
    """The pages of a window, taken at once: neither they nor the table change while it lives.

    Logical page p is the ring's page p mod R, so slot x is overwritten by slot x + R·page_size,
    which is R·page_size ≥ window − 1 + (the rows of the largest launch) + page_size away.
    """

    def __init__(self, pool: PagePool, **sizes: int) -> None:
        super().__init__(pool, **sizes)
        self.pages = [pool.allocate(self.owner) for _ in range(self.reserved)]
        logical = len(self.table)
        self.table[:] = np.array(self.pages, np.int32)[np.arange(logical) % self.reserved]
        self.slots = (self.table[:, None] * self.page_size + self._offsets).reshape(-1)
        self.end_page = logical

    def view_page(self, _position: int) -> int:
        """0: a row's sums over its window are cut at the same positions in every launch."""
        return 0

    def append(self, count: int) -> None:
        """Checks that ``count`` slots after the committed length are held."""
        num_slots = self.end_page * self.page_size
        if self.length + count > num_slots:
            raise SpecbuildError(
                f"cache group {self._pool.name}: a sequence holds {num_slots} slots, "
                f"{self.length + count} wanted; use fewer tokens"
            )

    def _free_unused(self) -> None:
        """Nothing goes back before the end."""

    def _release(self, _first: int, _end: int) -> None:
        self._pool.release(self.pages, self.owner)
        self.pages = []
        self.table[:] = 0
