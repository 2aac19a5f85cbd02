"""The prefix cache: prompts reuse the cached pages of a prefix that they share with earlier ones.

A published page is never written again. A page that no sequence holds stays cached until its pool
evicts it: the least recently released page first, children before parents. With a sliding window, a
prompt can resume only where all pages of the window are cached. Pages of such resume points, where
prompts end or branch, are evicted last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from specbuild.runtime.cache.page_pool import SharedPages
from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.prefix_tree import (
    PrefixEntry,
    PrefixTree,
    Span,
    TokenSource,
    runs,
)
from specbuild.runtime.cache.resume_points import ResumePoint, ResumePoints
from specbuild.runtime.cache.sequence_pages import SequencePages
from specbuild.runtime.cache.state_snapshots import SnapshotStatistics, StateSnapshots
from specbuild.runtime.engine_dir.cache_groups import allocators
from specbuild.runtime.engine_dir.drafters.registry import DRAFT_GROUPS
from specbuild.runtime.engine_dir.manifest import STATE_GROUP, CacheGroup
from specbuild.runtime.errors import SpecbuildError

# The window of a group whose next token attends to the last page alone, as it does to a snapshot.
_ONE_PAGE_WINDOW = 2


@dataclass(slots=True, eq=False)
class SequencePrefix(TokenSource):
    """The known tokens of one sequence, and how many pages it has published.

    ``published``: pages per group that the sequence has published. ``branch_page``: the page at
    which its prompt branches off from cached prompts.
    """

    cache: PrefixCache
    prompt_tokens: int
    branch_page: int = 0
    published: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MatchResult:
    """The cached prefix of a prompt: ``tokens`` tokens in the pages ``shared``, by allocator.

    In every group without a window, the first ``branch_page`` pages are cached.
    """

    tokens: int = 0
    shared: Mapping[str, SharedPages] = field(default_factory=dict)
    branch_page: int = 0


@dataclass
class PrefixStatistics(SnapshotStatistics):
    """Counters since the engine was loaded: admitted prompts, their tokens, and pages."""

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    published_pages: int = 0
    evicted_pages: int = 0

    @property
    def misses(self) -> int:
        """Prompts without a cached prefix."""
        return self.queries - self.hits


class PageListener(Protocol):
    """Receives changes to the cached pages of the target's first group without a window.

    Called by the engine thread, so it must not block.
    """

    def stored(self, entry: PrefixEntry, first: int, end: int) -> None:
        """Pages ``first … end − 1`` of an entry are cached now."""

    def removed(self, entry: PrefixEntry, index: int) -> None:
        """A page was evicted."""


@dataclass(frozen=True)
class PrefixLookup:
    """The cache as one loop uses it. A match also needs pages in the groups ``drafts``."""

    cache: PrefixCache
    drafts: Collection[str]

    def match(self, prefix: SequencePrefix) -> MatchResult:
        """See :meth:`PrefixCache.match`."""
        return self.cache.match(prefix, drafts=self.drafts)

    def should_wait(self, prefix: SequencePrefix, prefilling: Iterable[SequencePrefix]) -> bool:
        """Return whether a prompt that is being prefilled will publish pages of this prompt."""
        return any(
            self.cache.lacks_pages(other, pages, drafts=self.drafts)
            for other in prefilling
            for pages in (self.cache.common_pages(prefix, other),)
        )


class PrefixCache:
    """The prefix cache of one engine, for use by its engine thread only.

    :meth:`begin` registers a prompt, :meth:`match` finds its cached pages, and :meth:`publish` adds
    pages. A page is published once all its positions are committed and the next token is known.
    Pages of generated tokens are published only with ``publish_generated``, since decoding may
    round them differently than prefill. ``listener`` may be set. In an engine with recurrent states
    a prompt can resume only after a page with one of the ``snapshots``.

    Raises SpecbuildError if the groups have different page sizes.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        kv: KvPools,
        *,
        drafts: bool,
        publish_generated: bool = False,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        sizes = {group.page_size for group in groups}
        if len(sizes) > 1:
            raise SpecbuildError(f"the prefix cache needs pages of one size, not {sorted(sizes)}")
        (self.page_size,) = sizes
        self.statistics = PrefixStatistics()
        self._resets = 0
        self.publish_generated = publish_generated
        self.lookahead_tokens = int(drafts)
        windows = {group.name: group.window for group in groups}
        self._names = list(allocators(groups))
        self._windows = {name: windows[name] for name in self._names}
        # The allocator whose pages a listener is notified of.
        self._reported_allocator = next(
            (i for i, n in enumerate(self._names) if not windows[n] and n not in DRAFT_GROUPS), 0
        )
        self.listener: PageListener | None = None
        self._pools = [kv.pools[name] for name in self._names]
        self.snapshots = snapshots
        if snapshots is not None:
            self._names.append(STATE_GROUP)
            self._windows[STATE_GROUP] = _ONE_PAGE_WINDOW
            self._pools.append(snapshots.pool)
        self._tree = PrefixTree(
            [pool.pages + 1 for pool in self._pools], page_size=self.page_size, drafts=drafts
        )
        if snapshots is not None:
            snapshots.attach(self._tree, len(self._names) - 1, self.statistics)
        self._resume_points = {
            name: ResumePoints(pool)
            for name, pool in zip(self._names, self._pools, strict=True)
            if self._windows[name] and name != STATE_GROUP
        }
        for allocator, pool in enumerate(self._pools):
            pool.on_evict = self._eviction_callback(allocator)
            # Pages of a window are useful without the pages before them.
            if not self._windows[pool.name]:
                pool.children = partial(self._tree.children_of, allocator)

    def begin(self, prompt_ids: np.ndarray, salt: str | None) -> SequencePrefix:
        """Return the prefix of a prompt, int32 [·]. Prompts with different salts share no pages."""
        if self._resets:
            salt = f"{self._resets}:{salt or ''}"
        return SequencePrefix(prompt_ids, salt, self, len(prompt_ids))

    def reset(self) -> None:
        """Let no later sequence match pages of earlier ones. Any thread may call it."""
        self._resets += 1

    def match(self, prefix: SequencePrefix, *, drafts: Collection[str]) -> MatchResult:
        """Find the longest cached prefix of a prompt, without its last token.

        A group without a window needs its pages from 0 on, one with a window those that the next
        token attends to. Of the draft groups, only ``drafts`` must have them.
        """
        spans = self._tree.walk(prefix, (prefix.prompt_tokens - 1) // self.page_size)
        if not spans:
            return MatchResult()
        pages = np.concatenate([span.pages for span in spans], axis=1)
        selected = [
            (allocator, name)
            for allocator, name in enumerate(self._names)
            if name in drafts or name not in DRAFT_GROUPS
        ]
        unwindowed = [allocator for allocator, name in selected if not self._windows[name]]
        branch_page = _count_leading((pages[unwindowed] != 0).all(axis=0))
        can_resume = np.ones(branch_page, bool)
        for allocator, name in selected:
            if self._windows[name]:
                can_resume &= self._can_resume(name, pages[allocator, :branch_page])
        count = int(can_resume.nonzero()[0][-1]) + 1 if can_resume.any() else 0
        if not count:
            return MatchResult(branch_page=branch_page)
        shared = {
            name: SharedPages(first, tuple(pages[allocator, first:count].tolist()))
            for allocator, name in selected
            for first in (self._first_page(name, count),)
        }
        return MatchResult(count * self.page_size, shared, branch_page)

    def admitted(self, prefix: SequencePrefix, match: MatchResult, *, was_preempted: bool) -> None:
        """Record that a sequence starts with this match.

        ``was_preempted``: the sequence was counted before.
        """
        count = match.tokens // self.page_size
        prefix.published = dict.fromkeys(match.shared, count)
        prefix.branch_page = match.branch_page
        if count and count == match.branch_page:
            spans = self._tree.walk(prefix, count)
            for name in self._resume_points.keys() & match.shared.keys():
                self._add_resume_point(name, spans, count)
        if not was_preempted:
            self.statistics.queries += 1
            self.statistics.query_tokens += prefix.prompt_tokens
            self.statistics.hits += match.tokens > 0
            self.statistics.hit_tokens += match.tokens

    def publish(
        self,
        prefix: SequencePrefix,
        holders: Mapping[str, SequencePages],
        ids: np.ndarray,
        *,
        length: int,
        num_tokens: int,
        draft: str | None = None,
    ) -> None:
        """Publish pages of the first ``length`` tokens, of the target or of the group ``draft``.

        ``ids[:num_tokens]`` are the sequence's tokens. Call it before pages of a window are freed.
        """
        last = num_tokens if self.publish_generated else min(num_tokens, prefix.prompt_tokens)
        end = min(length, last - 1) // self.page_size
        names = [
            name
            for name in self._names
            if (name == draft if draft else name not in DRAFT_GROUPS)
            and prefix.published.get(name, 0) < end
        ]
        if not names:
            return
        if last > prefix.prompt_tokens:
            prefix.ids = ids
        spans = self._tree.walk_or_add(prefix, end)
        for name in names:
            if self.snapshots is not None and name == STATE_GROUP:
                self.snapshots.place(spans, holders[name])
            else:
                self._place(name, spans, holders[name], prefix.published.get(name, 0))
            if name in self._resume_points:
                self._move_resume_point(prefix, name, spans, end)
            prefix.published[name] = end
        self._tree.prune(spans[-1].entry)

    def num_draft_tokens(self, prefix: SequencePrefix, num_tokens: int) -> int:
        """Return how many tokens of a prompt the draft should ingest."""
        return (min(num_tokens, prefix.prompt_tokens) - 1) // self.page_size * self.page_size

    def common_pages(self, one: SequencePrefix, other: SequencePrefix) -> int:
        """Return the number of pages that both prompts share, without the last token of either."""
        end = (min(one.prompt_tokens, other.prompt_tokens) - 1) // self.page_size
        return self._tree.common(one, other, end)

    def lacks_pages(self, prefix: SequencePrefix, pages: int, *, drafts: Collection[str]) -> bool:
        """Return whether a sequence has yet to publish some of its first ``pages`` pages."""
        return any(
            prefix.published.get(name, 0) < pages
            for name in self._names
            if name in drafts or name not in DRAFT_GROUPS
        )

    def blocks(self) -> list[Span]:
        """Return the cached pages that a listener was notified of."""
        return self._tree.spans(self._reported_allocator)

    def check_integrity(self) -> None:
        """Raise SpecbuildError unless all pages of an idle engine are free or in the tree."""
        self._tree.check_integrity()
        for allocator, pool in enumerate(self._pools):
            pool.check_integrity()
            placed = len(self._tree.cached_pages(allocator))
            if placed != pool.cached_pages:
                raise SpecbuildError(
                    f"cache group {pool.name}: {pool.cached_pages} pages are cached, but {placed} "
                    "are in the tree; please report it"
                )
        for points in self._resume_points.values():
            points.check_integrity()

    def _place(
        self, name: str, spans: Sequence[Span], holder: SequencePages, published: int
    ) -> None:
        """Add a sequence's pages to the tree; pages of earlier sequences stay in place.

        Pages that the sequence published before are in the tree, unless their entry was pruned
        since.
        """
        allocator = self._names.index(name)
        for span in spans:
            first = max(span.first, published if span.entry.num_pages else 0, holder.first_page)
            if first < span.end:
                # Indexing with numpy's own index type is four times as fast.
                pages = holder.table[first : span.end].astype(np.intp)
                new_span = Span(span.entry, first, span.end)
                placed, indices = self._tree.place(allocator, new_span, pages)
                self._pools[allocator].cache(placed, evict_first=name in self._resume_points)
                self.statistics.published_pages += len(placed)
                if self.listener is not None and allocator == self._reported_allocator:
                    for first_placed, end in runs(indices):
                        self.listener.stored(span.entry, first_placed, end)

    def _move_resume_point(
        self, prefix: SequencePrefix, name: str, spans: Sequence[Span], end: int
    ) -> None:
        """Update the resume points of a group whose pages are published up to ``end``.

        Later prompts may resume where this prompt branches off, where it ends, and at the end of
        its output. The last point moves as the output grows.
        """
        before = prefix.published.get(name, 0)
        prompt = (prefix.prompt_tokens - 1) // self.page_size
        for count in {prefix.branch_page, prompt}:
            if before < count <= end:
                self._add_resume_point(name, spans, count)
        if end > prompt:
            if before > prompt:
                self._resume_points[name].remove(_resume_point(spans, before))
            self._add_resume_point(name, spans, end)

    def _add_resume_point(self, name: str, spans: Sequence[Span], count: int) -> None:
        """Add a resume point after ``count`` pages if the window's pages before it are cached."""
        allocator, first = self._names.index(name), self._first_page(name, count)
        pages: list[int] = []
        for span in spans:
            lo, hi = max(span.first, first), min(span.end, count)
            if lo < hi:
                pages += span.pages[allocator, lo - span.first : hi - span.first].tolist()
        if pages and all(pages):
            self._resume_points[name].add(_resume_point(spans, count), pages)

    def _can_resume(self, name: str, pages: np.ndarray) -> np.ndarray:
        """Return, for each of ``pages``, whether a prompt can resume after it: bool [·]."""
        counts = np.arange(1, len(pages) + 1)
        first = np.maximum(0, counts * self.page_size - self._windows[name] + 1) // self.page_size
        num_cached_before = np.concatenate([[0], np.cumsum(pages != 0)])
        return num_cached_before[counts] - num_cached_before[first] == counts - first

    def _first_page(self, name: str, count: int) -> int:
        """Return the first page of a group that the token after ``count`` pages attends to."""
        window = self._windows[name]
        return max(0, count * self.page_size - window + 1) // self.page_size if window else 0

    def _eviction_callback(self, allocator: int) -> Callable[[int], None]:
        name = self._names[allocator]
        if self.snapshots is not None and name == STATE_GROUP:
            return self.snapshots.forget_evicted

        def forget_evicted(page: int) -> None:
            entry, index = self._tree.remove(allocator, page)
            if name in self._resume_points:
                self._resume_points[name].remove_page(page)
            elif name not in DRAFT_GROUPS:
                for points in self._resume_points.values():
                    points.remove((entry.number, index + 1))
                if self.snapshots is not None:
                    self.snapshots.discard_after(entry, index)
            self.statistics.evicted_pages += 1
            if self.listener is not None and allocator == self._reported_allocator:
                self.listener.removed(entry, index)

        return forget_evicted


def _count_leading(is_cached: np.ndarray) -> int:
    """Return the number of leading true values."""
    return len(is_cached) if is_cached.all() else int(is_cached.argmin())


def _resume_point(spans: Sequence[Span], count: int) -> ResumePoint:
    """Return the resume point after ``count`` pages."""
    entry = next(span.entry for span in spans if span.first < count <= span.end)
    return entry.number, count
