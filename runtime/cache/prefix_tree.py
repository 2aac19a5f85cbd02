"""A tree of prompt prefixes. Each branch holds pages that one sequence was the first to fill.

A page is identified by all tokens up to its end and by the salt. In an engine with drafts the next
token counts too: the draft's cache entry at position t is computed from h_t and x_{t+1}. Tokens are
compared directly, one branch at a time, without hashing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from specbuild.runtime.errors import SpecbuildError

# A page's index and the bytes of its tokens, and in an engine with drafts of the next token.
PrefixKey: TypeAlias = tuple[int, bytes]


@dataclass(slots=True, eq=False)
class TokenSource:
    """The tokens that pages are filled from: int32 [·] from position 0 on.

    Known tokens never change; a longer array may replace ``ids``.
    """

    ids: np.ndarray
    salt: str | None


@dataclass(slots=True, eq=False, weakref_slot=True, kw_only=True)
class PrefixEntry:
    """A branch of the tree: pages ``first … end − 1`` of the tokens of ``origin``.

    ``pages[a, i]`` is the page of allocator a for page index ``first + i``; 0 is none. Columns past
    ``end`` are unused. ``num_pages`` counts the cached pages.
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
        """Extend the branch up to page ``end``; the new pages are not cached yet."""
        needed, capacity = end - self.first, self.pages.shape[1]
        if needed > capacity:
            more = max(needed, 2 * capacity) - capacity
            zeros = np.zeros((len(self.pages), more), np.int32)
            self.pages = np.concatenate([self.pages, zeros], axis=1)
        self.end = end


class Span(NamedTuple):
    """Pages ``first … end − 1`` of a prefix, in one branch."""

    entry: PrefixEntry
    first: int
    end: int

    @property
    def pages(self) -> np.ndarray:
        """The pages, int32 [allocators, end − first], as a view."""
        return self.entry.pages[:, self.first - self.entry.first : self.end - self.entry.first]


class PrefixTree:
    """A tree of pages with ``page_size`` tokens; ``pages`` is the page count per allocator.

    ``drafts``: the token after a page is part of its identity. An entry is pruned when it has
    neither pages nor children.
    """

    def __init__(self, pages: Sequence[int], *, page_size: int, drafts: bool) -> None:
        self._page_size, self._lookahead = page_size, int(drafts)
        self._roots: dict[str | None, PrefixEntry] = {}
        self._entries: dict[int, PrefixEntry] = {}
        self._added = 0
        # By allocator and page: the number of its branch, 0 for none, and its page index.
        self._entry_of = [np.zeros(count, np.int32) for count in pages]
        self._index_of = [np.zeros(count, np.int32) for count in pages]
        self._indices = np.arange(max(pages), dtype=np.int32)

    def walk(self, source: TokenSource, end: int) -> list[Span]:
        """Return the branches that match the tokens, from page 0 up to at most page ``end``.

        The token after page ``end − 1`` must be known.
        """
        spans: list[Span] = []
        entry, page_index = self._roots.get(source.salt), 0
        while entry is not None and page_index < end:
            entry = entry.children.get(self._key(source, page_index))
            if entry is not None:
                same_end = self._shared_end(source, entry.origin, page_index, min(entry.end, end))
                spans.append(Span(entry, page_index, same_end))
                page_index = same_end
        return spans

    def walk_or_add(self, source: TokenSource, end: int) -> list[Span]:
        """Return the branches as :meth:`walk` does, and add a branch for the remaining pages."""
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
        """Return how many of the first ``end`` pages both token sequences share."""
        if not end or one.salt != other.salt or self._key(one, 0) != self._key(other, 0):
            return 0
        return self._shared_end(one, other, 0, end)

    def place(self, allocator: int, span: Span, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add pages to the empty places of a span; return the added pages and their indices."""
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
        """Remove a page; return its branch and index."""
        entry = self._entries[self._entry_of[allocator].item(page)]
        index = self._index_of[allocator].item(page)
        entry.pages[allocator, index - entry.first] = 0
        self._entry_of[allocator][page] = 0
        entry.num_pages -= 1
        self.prune(entry)
        return entry, index

    def children_of(self, allocator: int, page: int) -> list[int]:
        """Return the cached pages that directly follow a page."""
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
        """Remove a branch that has neither pages nor children, then each parent left empty."""
        while not entry.num_pages and not entry.children:
            if entry.parent is None:
                self._roots.pop(entry.origin.salt, None)
                return
            del entry.parent.children[entry.key]
            self._entries.pop(entry.number)
            entry = entry.parent

    def cached_pages(self, allocator: int) -> np.ndarray:
        """Return the pages of an allocator that are in the tree."""
        return np.flatnonzero(self._entry_of[allocator])

    def spans(self, allocator: int) -> list[Span]:
        """Return the contiguous cached pages of an allocator, parents before children."""
        return [
            Span(entry, entry.first + first, entry.first + end)
            for entry in self._entries.values()
            for first, end in runs(np.flatnonzero(entry.pages[allocator]))
        ]

    def check_integrity(self) -> None:
        """Raise SpecbuildError unless branches and pages refer to each other."""
        num_pages = [0] * len(self._entry_of)
        for entry in self._entries.values():
            branch_pages = entry.pages[:, : entry.end - entry.first]
            cached = np.nonzero(branch_pages)
            for allocator, place in zip(*(axis.tolist() for axis in cached), strict=True):
                page = branch_pages[allocator, place]
                recorded = (self._entry_of[allocator][page], self._index_of[allocator][page])
                if recorded != (entry.number, entry.first + place):
                    raise SpecbuildError(
                        f"prefix tree: page {page} is recorded at {recorded}, not at "
                        f"{(entry.number, entry.first + place)}; please report it"
                    )
                num_pages[allocator] += 1
            if entry.num_pages != len(cached[0]) or not (entry.num_pages or entry.children):
                raise SpecbuildError(
                    f"prefix tree: a branch counts {entry.num_pages} pages and has "
                    f"{len(cached[0])}; please report it"
                )
        counted = [len(self.cached_pages(allocator)) for allocator in range(len(num_pages))]
        if counted != num_pages:
            raise SpecbuildError(
                f"prefix tree: branches have {num_pages} pages, but {counted} are "
                "recorded; please report it"
            )

    def _key(self, source: TokenSource, page_index: int) -> PrefixKey:
        return page_index, source.ids[
            page_index * self._page_size : (page_index + 1) * self._page_size + self._lookahead
        ].tobytes()

    def _shared_end(self, one: TokenSource, other: TokenSource, page_index: int, end: int) -> int:
        """Return the end of the shared pages. Both sources share page ``page_index``."""
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
            root = PrefixEntry(
                number=0, origin=source, key=(0, b""), parent=None, first=0, end=0, pages=zeros
            )
            self._roots[source.salt] = root
        return root

    def _add(self, source: TokenSource, parent: PrefixEntry, first: int, end: int) -> PrefixEntry:
        self._added += 1
        key = self._key(source, first)
        pages = np.zeros((len(self._entry_of), end - first), np.int32)
        entry = PrefixEntry(
            number=self._added,
            origin=source,
            key=key,
            parent=parent,
            first=first,
            end=end,
            pages=pages,
        )
        parent.children[key] = self._entries[self._added] = entry
        return entry


def runs(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Return ascending numbers as ranges ``first … end − 1``."""
    if not len(numbers):
        return []
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    parts = np.split(numbers, cuts)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]
