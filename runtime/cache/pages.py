"""Who may hold cache memory: the pages of one sequence, and the pools of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specbuild.runtime.cache.page_pool import (
    PagePool,
    PagesInstalled,
    PagesReleased,
    SharedPages,
)
from specbuild.runtime.cache.page_trace import TRACE_VERSION, PageTrace
from specbuild.runtime.engine_dir.cache_groups import (
    allocators,
    pages_held,
    slots_per_sequence,
    tree_slots,
)
from specbuild.runtime.engine_dir.manifest import CacheGroup, Limits
from specbuild.runtime.errors import SpecbuildError


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
        size = self.page_size
        end = -(-(self.length + count) // size)
        if end > len(self.table):
            raise SpecbuildError(
                f"cache group {self._pool.name}: a sequence holds {len(self.slots)} slots, "
                f"{self.length + count} wanted; use fewer tokens"
            )
        if end - self.first_page > self.reserved + self.shared:
            raise SpecbuildError(
                f"cache group {self._pool.name}: {end - self.first_page} pages wanted, "
                f"{self.reserved} reserved; use fewer tokens"
            )
        if end > self.end_page:
            taken = [self._pool.allocate(self.owner) for _ in range(self.end_page, end)]
            self._place(self.end_page, taken)
            self.end_page = end

    def begin_with(self, shared: SharedPages) -> None:
        """The sequence begins behind pages that others made and that it never writes.

        Before anything else is held. Where a window's pages go back while the sequence lives, its
        promise counts these too; else they need none.
        """
        self._pool.share(shared.pages, self.owner, covered=self.window > 0)
        self._place(shared.first, shared.pages)
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
        self._give_back()

    def rewind(self, length: int) -> None:
        """Forgets what lies past ``length``; SpecbuildError if its window is gone already."""
        if not 0 <= length <= self.length or self._window_page(length) < self.first_page:
            raise SpecbuildError(
                f"cache group {self._pool.name}: cannot rewind from {self.length} to {length}: "
                "the pages of that window were given back"
            )
        self.length = length
        self._oldest_row = min(self._oldest_row, length)
        self._give_back()

    def release(self) -> None:
        """Every page goes back, and the promise of them."""
        if not self.window:
            self._pool.uncover(self.table[self.shared : self.end_page].tolist())
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

    def _give_back(self) -> None:
        end = -(-self.length // self.page_size)
        if end < self.end_page:
            self._release(end, self.end_page)
            self.end_page = end
        if self.window:
            first = min(self._window_page(self._oldest_row), self.end_page)
            if first > self.first_page:
                self._release(self.first_page, first)
                self.first_page = first

    def _place(self, first: int, pages: Sequence[int]) -> None:
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


class KeptPages(SequencePages):
    """Pages that stay until the end: steps in flight write behind the length that is committed.

    What is reserved is taken at once.
    """

    def __init__(self, pool: PagePool, **sizes: int) -> None:
        super().__init__(pool, **sizes)
        self.append(self.reserved * self.page_size)

    def reserve(self, pages: int) -> None:
        """More pages are taken: the table grows."""
        super().reserve(pages)
        self.append(self.reserved * self.page_size - self.length)

    def _give_back(self) -> None:
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
        held = self.end_page * self.page_size
        if self.length + count > held:
            raise SpecbuildError(
                f"cache group {self._pool.name}: a sequence holds {held} slots, "
                f"{self.length + count} wanted; use fewer tokens"
            )

    def _give_back(self) -> None:
        """Nothing goes back before the end."""

    def _release(self, _first: int, _end: int) -> None:
        self._pool.release(self.pages, self.owner)
        self.pages = []
        self.table[:] = 0


class KvPools:
    """The page pools of an engine, by group name: groups that share an allocator have one pool.

    With ``fixed``, a sequence takes all that it reserves at once, and keeps it, as steps that run
    without the host need it.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        limits: Limits,
        released: PagesReleased | None = None,
        installed: PagesInstalled | None = None,
        *,
        fixed: bool = False,
    ) -> None:
        self._groups = {group.name: group for group in groups}
        self._limits = limits
        self._fixed = fixed
        self._shared = allocators(groups)
        self._trace: PageTrace | None = None
        self._admitted = 0
        self.pools: dict[str, PagePool] = {}
        for first, names in self._shared.items():
            pool = PagePool(
                first,
                self._groups[first].pages,
                _for_each(names, released),
                _for_each(names, installed),
            )
            self.pools |= dict.fromkeys(names, pool)

    @property
    def used_share(self) -> float:
        """The share of pages that are held, in the group that is fullest: 0 to 1."""
        return max(
            1 - self.pools[name].free_pages / max(group.pages - 1, 1)
            for name, group in self._groups.items()
        )

    @property
    def trace(self) -> PageTrace | None:
        """What is told of every page; set while none is held."""
        return self._trace

    @trace.setter
    def trace(self, trace: PageTrace | None) -> None:
        self._trace = trace
        for name in self._shared:
            self.pools[name].trace = trace
        if trace is not None:
            pages = {name: self.pools[name].free_pages for name in self._shared}
            trace.add("start", version=TRACE_VERSION, pages=pages)

    def pages_wanted(self, tokens: int, *, at_first: int | None = None) -> dict[str, int]:
        """Pages to reserve for a sequence that ends with ``tokens`` tokens.

        By group; of those that share an allocator the first stands for all. Those that keep every
        position begin with capacity for ``at_first`` tokens, where it is given.
        """
        grows = tokens if at_first is None else min(tokens, at_first)
        return {
            name: pages_held(group, self._limits, tokens=tokens if group.window else grows)
            for name in self._shared
            for group in (self._groups[name],)
        }

    def can_grow(self, pages: Mapping[str, SequencePages], tokens: int) -> bool:
        """Whether what a sequence lacks for ``tokens`` tokens and a tree is promised to nobody."""
        return self.can_admit(self._lacking(pages, tokens))

    def grow(self, pages: Mapping[str, SequencePages], tokens: int) -> None:
        """Reserves what a sequence lacks; SpecbuildError where :meth:`can_grow` is false."""
        for name, count in self._lacking(pages, tokens).items():
            pages[name].reserve(count)

    def _lacking(self, pages: Mapping[str, SequencePages], tokens: int) -> dict[str, int]:
        return {
            name: wanted - pages[name].reserved - pages[name].shared
            for name, wanted in self.pages_wanted(tokens).items()
            if wanted > pages[name].reserved + pages[name].shared
        }

    def capacity(self, pages: Mapping[str, SequencePages]) -> int:
        """The tokens up to which a sequence need not grow."""
        grow = (name for name, group in self._groups.items() if not group.window)
        return min(
            (
                (pages[name].reserved + pages[name].shared) * pages[name].page_size
                - tree_slots(name, self._limits)
                for name in grow
            ),
            default=self._limits.max_seq_len,
        )

    def can_admit(self, wanted: Mapping[str, int], *, spare: int = 0) -> bool:
        """Whether every group can promise its pages, with ``spare`` left where sequences grow."""
        return all(
            self.pools[name].can_reserve(pages + (0 if self._groups[name].window else spare))
            for name, pages in wanted.items()
        )

    def lacking_beside(
        self, wanted: Mapping[str, int], shared: Mapping[str, SharedPages]
    ) -> dict[str, int]:
        """Of the pages wanted, those that must be promised where a sequence begins with others'."""
        lacking = dict(wanted)
        for name, begins in shared.items():
            if not self._groups[name].window:
                idle = self.pools[name].not_held(begins.pages)
                lacking[name] += idle - len(begins.pages)
        return lacking

    def admit(
        self,
        wanted: Mapping[str, int],
        shared: Mapping[str, SharedPages] | None = None,
        *,
        request: str | None = None,
    ) -> dict[str, SequencePages]:
        """Reserves the pages and gives the holders, by group: empty ones, or full if fixed.

        ``shared`` pages, by allocator, stand for the first of those wanted. Groups that share an
        allocator have the same holder. A trace names the ``request``; None is a measurement.
        SpecbuildError where a group has too few pages; then no group has promised any.
        """
        shared = shared or {}
        for name, pages in self.lacking_beside(wanted, shared).items():
            self.pools[name].require(pages)
        self._admitted += 1
        if self._trace is not None:
            self._trace.add("admit", owner=self._admitted, request=request, promised=dict(wanted))
        holders: dict[str, SequencePages] = {}
        for name, pages in wanted.items():
            begins = shared.get(name)
            held = 0 if begins is None or self._groups[name].window else len(begins.pages)
            holder = self._holder(name, pages - held)
            if begins is not None:
                holder.begin_with(begins)
            holders |= dict.fromkeys(self._shared[name], holder)
        return {name: holders[name] for name in self._groups}

    def _holder(self, name: str, pages: int) -> SequencePages:
        group = self._groups[name]
        kind = SequencePages
        if self._fixed:
            kind = RingPages if group.window else KeptPages
        return kind(
            self.pools[name],
            page_size=group.page_size,
            window=group.window,
            capacity=slots_per_sequence(self._limits),
            reserved=pages,
            owner=self._admitted,
        )

    def release(self, pages: Mapping[str, SequencePages]) -> None:
        """Takes pages and promises back."""
        for name in self._shared:
            pages[name].release()


def _for_each(
    names: Sequence[str], call: Callable[[str, Sequence[int]], None] | None
) -> Callable[[str, Sequence[int]], None] | None:
    """A callback of an allocator: every group that it serves is told."""
    if call is None:
        return None

    def told(_first: str, pages: Sequence[int]) -> None:
        for name in names:
            call(name, pages)

    return told
