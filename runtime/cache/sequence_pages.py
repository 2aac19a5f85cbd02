"""The pages of one sequence in one cache group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.runtime.cache.page_pool import PagePool, SharedPages
from specbuild.runtime.errors import SpecbuildError

# Pages allocated beyond the needed ones, so that a table on a device changes less often.
_EXTRA_PAGES = 4


class SequencePages:
    """Pages of a sequence in one group, or in several groups that share an allocator.

    The sequence holds at most the ``reserved`` pages that its pool reserved, plus its first
    ``shared`` pages, which come from the prefix cache.

    Logical page p holds slots ``p·page_size …``. Pages ``first_page … end_page − 1`` are held.
    Pages before the window are freed. Pages past ``length`` exist only between :meth:`append` and
    :meth:`commit`. ``table[p]`` is the page (0 = none). ``slots[x]`` is slot x as a slot of the
    pool, valid for held pages. ``page_positions[p]`` is the position of slot ``p·page_size``.
    ``owner`` is the sequence's number in a trace.
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
        """Allocate pages for ``count`` slots after the committed length."""
        if self.length + count > len(self.slots):
            raise SpecbuildError(
                f"cache group {self._pool.name}: a sequence holds {len(self.slots)} slots, "
                f"{self.length + count} requested; use fewer tokens"
            )
        self._allocate_to(-(-(self.length + count) // self.page_size))

    def _allocate_to(self, end: int) -> None:
        """Allocate pages up to logical page ``end``."""
        if end - self.first_page > self.reserved + self.shared:
            raise SpecbuildError(
                f"cache group {self._pool.name}: {end - self.first_page} pages requested, "
                f"{self.reserved} reserved; use fewer tokens"
            )
        if end > self.end_page:
            new_pages = [self._pool.allocate(self.owner) for _ in range(self.end_page, end)]
            self._set_pages(self.end_page, new_pages)
            self.end_page = end

    def adopt(self, shared: SharedPages) -> None:
        """Start with pages of the prefix cache, which this sequence never writes.

        Call it before any page is allocated. With a window, whose pages are freed during the run,
        the sequence's reservation covers these pages too.
        """
        self._pool.share(shared.pages, self.owner, is_reserved=self.window > 0)
        self._set_pages(shared.first, shared.pages)
        self.first_page, self.end_page = shared.first, shared.first + len(shared.pages)
        self.length = self._oldest_row = self.end_page * self.page_size
        self.shared = 0 if self.window else len(shared.pages)

    def reserve(self, pages: int) -> None:
        """Reserve more pages; SpecbuildError if the pool has too few."""
        self._pool.reserve(pages)
        self.reserved += pages

    def commit(self, length: int, *, reverified: int | None = None) -> None:
        """Commit the first ``length`` slots and free pages that are no longer needed.

        Rows from ``reverified`` on may be computed again, so their windows are kept.
        """
        if not self.length <= length <= self.end_page * self.page_size:
            raise SpecbuildError(
                f"cache group {self._pool.name}: commit of {length} slots after {self.length}, "
                f"with capacity for {self.end_page * self.page_size}"
            )
        self.length = length
        self._oldest_row = length if reverified is None else min(length, reverified)
        self._free_unused()

    @property
    def next_freed_length(self) -> int:
        """The committed length from which the first held page may lie before the window."""
        return (self.first_page + 1) * self.page_size + self.window - 1

    def rewind(self, length: int) -> None:
        """Drop slots past ``length``; SpecbuildError if the window before it was freed."""
        if not 0 <= length <= self.length or self._window_page(length) < self.first_page:
            raise SpecbuildError(
                f"cache group {self._pool.name}: cannot rewind from {self.length} to {length}: "
                "the pages of that window were freed"
            )
        self.length = length
        self._oldest_row = min(self._oldest_row, length)
        self._free_unused()

    def release(self) -> None:
        """Release all pages and the reservation."""
        if not self.window:
            self._pool.transfer_reservation(self.table[self.shared : self.end_page].tolist())
        self._release(self.first_page, self.end_page)
        self._pool.unreserve(self.reserved)
        self.reserved = self.shared = 0
        self.length = self.first_page = self.end_page = self._oldest_row = 0

    def view_page(self, position: int) -> int:
        """Return the first held page that rows from this position on attend to."""
        return max(self.first_page, self._window_page(position))

    def _window_page(self, length: int) -> int:
        """Return the first page that the token at position ``length`` attends to."""
        return max(0, length - self.window + 1) // self.page_size if self.window else 0

    def _free_unused(self) -> None:
        end = -(-self.length // self.page_size)
        if end < self.end_page:
            self._release(end, self.end_page)
            self.end_page = end
        self._free_before_window()

    def _free_before_window(self) -> None:
        """Free the pages before the window of all later rows."""
        if self.window:
            first = min(self._window_page(self._oldest_row), self.end_page)
            if first > self.first_page:
                self._release(self.first_page, first)
                self.first_page = first

    def _set_pages(self, first: int, pages: Sequence[int]) -> None:
        """Write these pages to the table from logical page ``first`` on."""
        end = first + len(pages)
        self.table[first:end] = pages
        slots = self.slots.reshape(-1, self.page_size)
        slots[first:end] = self.table[first:end, None] * self.page_size + self._offsets

    def _release(self, first: int, end: int) -> None:
        """Release pages, the last ones first, so that they are evicted before their parents."""
        if end > first:
            self._pool.release(self.table[first:end][::-1].tolist(), self.owner)
            self.table[first:end] = 0


class AheadPages(SequencePages):
    """Pages for launches that are queued before earlier launches complete.

    :meth:`ensure` allocates what the next launch may write. Launches in flight may write past the
    committed length, so only pages before a window are freed. Launches run in queue order. So a
    freed page can be allocated again at once: its new owner's launches run later.
    """

    def ensure(self, end: int) -> bool:
        """Allocate pages for the first ``end`` slots; return whether the table changed.

        Allocates a few more pages if they are reserved.
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
    """Pages allocated at admission and kept to the end, so that the table never changes."""

    def __init__(self, pool: PagePool, **sizes: int) -> None:
        super().__init__(pool, **sizes)
        self.append(self.reserved * self.page_size)

    def reserve(self, pages: int) -> None:
        """Reserve and allocate more pages; the table grows."""
        super().reserve(pages)
        self.append(self.reserved * self.page_size - self.length)

    def _free_unused(self) -> None:
        """Free nothing: the pages are kept until :meth:`release`."""


class RingPages(SequencePages):
    """The pages of a window, allocated at admission. Pages and table do not change.

    Logical page p is page p mod R of the ring. So slot x is overwritten by slot x + R·page_size,
    where R·page_size ≥ window − 1 + (rows of the largest launch) + page_size.
    """

    def __init__(self, pool: PagePool, **sizes: int) -> None:
        super().__init__(pool, **sizes)
        self.pages = [pool.allocate(self.owner) for _ in range(self.reserved)]
        logical = len(self.table)
        self.table[:] = np.array(self.pages, np.int32)[np.arange(logical) % self.reserved]
        self.slots = (self.table[:, None] * self.page_size + self._offsets).reshape(-1)
        self.end_page = logical

    def view_page(self, _position: int) -> int:
        """Return 0, so that attention splits a window at the same positions in every launch."""
        return 0

    def append(self, count: int) -> None:
        """Check that ``count`` slots after the committed length are held."""
        num_slots = self.end_page * self.page_size
        if self.length + count > num_slots:
            raise SpecbuildError(
                f"cache group {self._pool.name}: a sequence holds {num_slots} slots, "
                f"{self.length + count} requested; use fewer tokens"
            )

    def _free_unused(self) -> None:
        """Free nothing: the pages are kept until :meth:`release`."""

    def _release(self, _first: int, _end: int) -> None:
        self._pool.release(self.pages, self.owner)
        self.pages = []
        self.table[:] = 0
