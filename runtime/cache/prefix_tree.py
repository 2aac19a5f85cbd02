"""Beginnings of prompts as a tree: each branch holds the pages that one sequence was first to fill.

A page belongs to the tokens up to its end, to the salt that they came with and, where the engine
drafts, to the token behind the page: the draft's cache entry at position t is made from h_t and
x_{t+1}. Tokens themselves are compared, a branch at once; nothing is hashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from specbuild.runtime.errors import SpecbuildError

# A page's index, and the bytes of its tokens with the one behind it where that counts.
PrefixKey: TypeAlias = tuple[int, bytes]


@dataclass(slots=True, eq=False)
class TokenSource:
    """Whose tokens pages are made from: int32 [·] from position 0 on, as far as they are known.

    What stands in ``ids`` never changes; a longer array may take its place.
    """

    ids: np.ndarray
    salt: str | None


@dataclass(slots=True, eq=False, weakref_slot=True)
class PrefixEntry:
    """Pages ``first … end − 1`` of the beginning that ``origin`` has; a branch of the tree.

    ``pages[a, i]`` is the page of allocator a that holds page ``first + i``; 0 is none. Columns
    past ``end`` are capacity. ``held`` counts those that are there.
    """

    number: int
    origin: TokenSource
    key: PrefixKey
    parent: PrefixEntry | None
    first: int
    end: int
    pages: np.ndarray
    num_pages: int = 0
    children: dict[PrefixKey, PrefixEntry] = field(default_factory=dict)

    def extend(self, end: int) -> None:
        """Names pages up to ``end``, none of which is there yet."""
        needed, capacity = end - self.first, self.pages.shape[1]
        if needed > capacity:
            more = max(needed, 2 * capacity) - capacity
            zeros = np.zeros((len(self.pages), more), np.int32)
            self.pages = np.concatenate([self.pages, zeros], axis=1)
        self.end = end


class Span(NamedTuple):
    """Pages ``first … end − 1`` of a beginning, which ``entry`` names."""

    entry: PrefixEntry
    first: int
    end: int

    @property
    def pages(self) -> np.ndarray:
        """int32 [allocators, end − first], a view."""
        return self.entry.pages[:, self.first - self.entry.first : self.end - self.entry.first]


class PrefixTree:
    """Of pages of ``page_size`` tokens, in allocators of so many ``pages`` each.

    ``drafts``: the token behind a page belongs to it. An entry stays while it has a page or a
    child.
    """

    def __init__(self, pages: Sequence[int], *, page_size: int, drafts: bool) -> None:
        self._page_size, self._lookahead = page_size, int(drafts)
        self._roots: dict[str | None, PrefixEntry] = {}
        self._entries: dict[int, PrefixEntry] = {}
        self._added = 0
        # By allocator and page: the number of its entry, 0 for none, and its index there.
        self._entry_of = [np.zeros(count, np.int32) for count in pages]
        self._index_of = [np.zeros(count, np.int32) for count in pages]
        self._indices = np.arange(max(pages), dtype=np.int32)

    def walk(self, source: TokenSource, end: int) -> list[Span]:
        """The entries that name pages 0 … of the tokens, as far as any do and up to ``end``.

        The token behind page ``end − 1`` must be known.
        """
        spans: list[Span] = []
        entry, page_index = self._roots.get(source.salt), 0
        while entry is not None and page_index < end:
            entry = entry.children.get(self._key(source, page_index))
            if entry is not None:
                num_same = self._same(source, entry.origin, page_index, min(entry.end, end))
                spans.append(Span(entry, page_index, num_same))
                page_index = num_same
        return spans

    def walk_or_add(self, source: TokenSource, end: int) -> list[Span]:
        """As :meth:`walk`, with an entry for the pages that none names yet."""
        spans = self.walk(source, end)
        page_index = spans[-1].end if spans else 0
        if page_index < end:
            last = spans[-1].entry if spans else self._root(source)
            if last.origin is source and last.end == page_index and last.parent is not None:
                last.extend(end)
            else:
                last = self._add(source, last, page_index, end)
            spans.append(Span(last, page_index, end))
        return spans

    def common(self, one: TokenSource, other: TokenSource, end: int) -> int:
        """With how many pages both begin, up to ``end`` of them."""
        if not end or one.salt != other.salt or self._key(one, 0) != self._key(other, 0):
            return 0
        return self._same(one, other, 0, end)

    def place(self, allocator: int, span: Span, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the pages [span] those that were taken, and their indices.

        Whose place another one has are not.
        """
        current = span.pages[allocator]
        indices = self._indices[span.first : span.end]
        if np.count_nonzero(current):
            free = current == 0
            current[free] = pages = pages[free]
            indices = indices[free]
        else:
            current[:] = pages
        self._entry_of[allocator][pages] = span.entry.number
        self._index_of[allocator][pages] = indices
        span.entry.num_pages += len(pages)
        return pages, indices

    def remove(self, allocator: int, page: int) -> tuple[PrefixEntry, int]:
        """Takes a page out; the entry and the index that it had."""
        entry = self._entries[self._entry_of[allocator].item(page)]
        index = self._index_of[allocator].item(page)
        entry.pages[allocator, index - entry.first] = 0
        self._entry_of[allocator][page] = 0
        entry.num_pages -= 1
        self.prune(entry)
        return entry, index

    def children_of(self, allocator: int, page: int) -> list[int]:
        """The pages that stand right behind one."""
        entry = self._entries[self._entry_of[allocator].item(page)]
        next_index = self._index_of[allocator].item(page) + 1
        cached = []
        if next_index < entry.end:
            cached.append(entry.pages.item(allocator, next_index - entry.first))
        for child in entry.children.values():
            if child.first == next_index:
                cached.append(child.pages.item(allocator, 0))
        return [each for each in cached if each]

    def prune(self, entry: PrefixEntry) -> None:
        """Forgets an entry that has neither pages nor children, and then its parent likewise."""
        while not entry.num_pages and not entry.children:
            if entry.parent is None:
                self._roots.pop(entry.origin.salt, None)
                return
            del entry.parent.children[entry.key]
            self._entries.pop(entry.number)
            entry = entry.parent

    def cached_pages(self, allocator: int) -> np.ndarray:
        """The pages of an allocator that are in the tree."""
        return np.flatnonzero(self._entry_of[allocator])

    def spans(self, allocator: int) -> list[Span]:
        """Where pages of an allocator stand without a gap, parents before their children."""
        return [
            Span(entry, entry.first + first, entry.first + end)
            for entry in self._entries.values()
            for first, end in runs(np.flatnonzero(entry.pages[allocator]))
        ]

    def check_integrity(self) -> None:
        """SpecbuildError unless entries and pages name each other."""
        num_pages = [0] * len(self._entry_of)
        for entry in self._entries.values():
            named = entry.pages[:, : entry.end - entry.first]
            cached = np.nonzero(named)
            for allocator, place in zip(*(axis.tolist() for axis in cached), strict=True):
                page = named[allocator, place]
                where = (self._entry_of[allocator][page], self._index_of[allocator][page])
                if where != (entry.number, entry.first + place):
                    raise SpecbuildError(
                        f"prefix tree: page {page} stands at {where}, not at "
                        f"{(entry.number, entry.first + place)}; please report it"
                    )
                num_pages[allocator] += 1
            if entry.num_pages != len(cached[0]) or not (entry.num_pages or entry.children):
                raise SpecbuildError(
                    f"prefix tree: an entry counts {entry.num_pages} pages and has "
                    f"{len(cached[0])}; please report it"
                )
        counted = [len(self.cached_pages(allocator)) for allocator in range(len(num_pages))]
        if counted != num_pages:
            raise SpecbuildError(
                f"prefix tree: entries hold {num_pages} pages, {counted} have one; please report it"
            )

    def _key(self, source: TokenSource, page_index: int) -> PrefixKey:
        return page_index, source.ids[
            page_index * self._page_size : (page_index + 1) * self._page_size + self._lookahead
        ].tobytes()

    def _same(self, one: TokenSource, other: TokenSource, page_index: int, end: int) -> int:
        """Up to which page of ``at … end`` two have the same tokens, who have those of ``at``."""
        if one is other:
            return end
        compared = slice(page_index * self._page_size, end * self._page_size + self._lookahead)
        is_different = one.ids[compared] != other.ids[compared]
        place = int(is_different.argmax())
        if not is_different[place]:
            return end
        return (compared.start + place - self._lookahead) // self._page_size

    def _root(self, source: TokenSource) -> PrefixEntry:
        root = self._roots.get(source.salt)
        if root is None:
            zeros = np.zeros((len(self._entry_of), 0), np.int32)
            root = PrefixEntry(0, source, (0, b""), None, 0, 0, zeros)
            self._roots[source.salt] = root
        return root

    def _add(self, source: TokenSource, parent: PrefixEntry, first: int, end: int) -> PrefixEntry:
        self._added += 1
        key = self._key(source, first)
        pages = np.zeros((len(self._entry_of), end - first), np.int32)
        entry = PrefixEntry(self._added, source, key, parent, first, end, pages)
        parent.children[key] = self._entries[self._added] = entry
        return entry


def runs(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Rising numbers as ranges ``first … end − 1``."""
    if not len(numbers):
        return []
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    parts = np.split(numbers, cuts)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]
