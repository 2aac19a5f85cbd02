"""Who may hold cache memory: the pages of every group, and the pages of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.manifest import CacheGroup, Limits

PagesReleased = Callable[[str, Sequence[int]], None]


DRAFT_GROUP = "draft"


def tree_slots(group: str, limits: Limits) -> int:
    """Slots that a tree takes behind the committed tokens: N + 1, in the draft K·(D − 1)."""
    if group == DRAFT_GROUP:
        return limits.draft_top_k * max(limits.draft_depth - 1, 0)
    return limits.draft_tokens + 1


def slots_per_sequence(limits: Limits) -> int:
    """Slots that a sequence of full length needs in any group, its tree included."""
    return limits.max_seq_len + max(tree_slots(name, limits) for name in ("", DRAFT_GROUP))


def pages_per_sequence(
    group: str, limits: Limits, *, tokens: int, page_size: int, window: int
) -> int:
    """Most pages that a sequence of ``tokens`` tokens holds at once in a group.

    A window keeps itself and the rows of the largest launch, which may start inside a page.
    """
    tree = tree_slots(group, limits)
    pages = -(-(tokens + tree) // page_size)
    if window == 0:
        return pages
    held = window - 1 + max(limits.max_rows, tree)
    return min(pages, -(-held // page_size) + 1)


class PagePool:
    """The free pages of one group. Page 0 is never handed out.

    ``reserve`` promises pages to a sequence before it takes any, so that what was admitted
    never has to wait.
    """

    def __init__(self, name: str, pages: int, released: PagesReleased | None = None) -> None:
        self.name = name
        self._free = list(range(pages - 1, 0, -1))
        self._unreserved = pages - 1
        self._released = released

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def can_reserve(self, pages: int) -> bool:
        """Whether this many pages are promised to nobody."""
        return pages <= self._unreserved

    def reserve(self, pages: int) -> None:
        """Promises pages; SpecbuildError where :meth:`can_reserve` is false."""
        if not self.can_reserve(pages):
            raise SpecbuildError(
                f"cache group {self.name}: {pages} pages wanted, {self._unreserved} left; "
                "run fewer or shorter sequences"
            )
        self._unreserved -= pages

    def unreserve(self, pages: int) -> None:
        """Takes a promise back."""
        self._unreserved += pages

    def allocate(self) -> int:
        """One page."""
        if not self._free:
            raise SpecbuildError(f"cache group {self.name}: no free page; run fewer sequences")
        return self._free.pop()

    def release(self, pages: Sequence[int]) -> None:
        """Pages go back."""
        self._free.extend(pages)
        if self._released is not None:
            self._released(self.name, pages)


class SequencePages:
    """One sequence's pages in one group.

    Logical page p holds slots ``p·page_size …``. Pages ``first_page … end_page − 1`` are held:
    those before the window are given back, those past ``length`` exist only between
    :meth:`append` and :meth:`commit`. ``table[p]`` is the page (0 = none), ``slots[x]`` where
    slot x lies in the pool (valid for held pages).
    """

    def __init__(self, pool: PagePool, *, page_size: int, window: int, capacity: int) -> None:
        logical = -(-capacity // page_size)
        self.page_size = page_size
        self.window = window
        self.length = 0
        self.first_page = 0
        self.end_page = 0
        self.table = np.zeros(logical, np.int32)
        self.slots = np.zeros(logical * page_size, np.int32)
        self._pool = pool
        self._offsets = np.arange(page_size, dtype=np.int32)

    def append(self, count: int) -> None:
        """Makes room for ``count`` slots after the committed length."""
        size = self.page_size
        end = -(-(self.length + count) // size)
        if end > len(self.table):
            raise SpecbuildError(
                f"cache group {self._pool.name}: a sequence holds {len(self.slots)} slots, "
                f"{self.length + count} wanted; use fewer tokens"
            )
        while self.end_page < end:
            page = self._pool.allocate()
            place = self.end_page
            self.table[place] = page
            self.slots[place * size : (place + 1) * size] = self._offsets + page * size
            self.end_page += 1

    def commit(self, length: int) -> None:
        """The first ``length`` slots are the sequence; pages that it has no use for go back."""
        if not self.length <= length <= self.end_page * self.page_size:
            raise SpecbuildError(
                f"cache group {self._pool.name}: commit of {length} slots after {self.length}, "
                f"with room for {self.end_page * self.page_size}"
            )
        self.length = length
        self._give_back()

    def rewind(self, length: int) -> None:
        """Forgets what lies past ``length``; SpecbuildError if its window is gone already."""
        if not 0 <= length <= self.length or self._window_page(length) < self.first_page:
            raise SpecbuildError(
                f"cache group {self._pool.name}: cannot rewind from {self.length} to {length}: "
                "the pages of that window were given back"
            )
        self.length = length
        self._give_back()

    def release(self) -> None:
        """Every page goes back."""
        self._release(self.first_page, self.end_page)
        self.length = self.first_page = self.end_page = 0

    def _window_page(self, length: int) -> int:
        """The first page that the token at position ``length`` sees."""
        return max(0, length - self.window + 1) // self.page_size if self.window else 0

    def _give_back(self) -> None:
        end = -(-self.length // self.page_size)
        if end < self.end_page:
            self._release(end, self.end_page)
            self.end_page = end
        if self.window:
            first = min(self._window_page(self.length), self.end_page)
            if first > self.first_page:
                self._release(self.first_page, first)
                self.first_page = first

    def _release(self, first: int, end: int) -> None:
        if end > first:
            self._pool.release(self.table[first:end].tolist())
            self.table[first:end] = 0


class KvPools:
    """The page pools of an engine, by group name."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        limits: Limits,
        released: PagesReleased | None = None,
    ) -> None:
        self._groups = {group.name: group for group in groups}
        self._limits = limits
        self.pools = {g.name: PagePool(g.name, g.pages, released) for g in groups}

    def pages_wanted(self, tokens: int) -> dict[str, int]:
        """Pages to reserve for a sequence that ends with ``tokens`` tokens, by group."""
        return {
            name: pages_per_sequence(
                name,
                self._limits,
                tokens=tokens,
                page_size=group.page_size,
                window=group.window,
            )
            for name, group in self._groups.items()
        }

    def can_admit(self, wanted: Mapping[str, int]) -> bool:
        """Whether every group can promise its pages."""
        return all(self.pools[name].can_reserve(pages) for name, pages in wanted.items())

    def admit(self, wanted: Mapping[str, int]) -> dict[str, SequencePages]:
        """Reserves the pages and gives the (still empty) holders, by group."""
        for name, pages in wanted.items():
            self.pools[name].reserve(pages)
        capacity = slots_per_sequence(self._limits)
        return {
            name: SequencePages(
                self.pools[name],
                page_size=group.page_size,
                window=group.window,
                capacity=capacity,
            )
            for name, group in self._groups.items()
        }

    def release(self, pages: Mapping[str, SequencePages], wanted: Mapping[str, int]) -> None:
        """Takes pages and promises back."""
        for holder in pages.values():
            holder.release()
        for name, count in wanted.items():
            self.pools[name].unreserve(count)
