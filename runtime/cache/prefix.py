"""The prefix cache: a prompt that begins as another one did takes over the pages of the beginning.

A page's key names the tokens up to the page's end, the salt that they came with and, where the
engine drafts, the token behind the page: the draft's cache entry at position t is made from h_t and
x_{t+1}. Keys are 64 bits of a random polynomial, so what they name is compared too.

Pages that were published are never written again. Those that no sequence holds stay until their
pool gives them to somebody else, the one first that was let go of first; a sequence lets go of its
last page first, so a page goes before the one that it continues.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType

import numpy as np

from specbuild.runtime.cache.pages import KvPools, SequencePages, SharedPages
from specbuild.runtime.engine_dir.cache_groups import DRAFT_GROUP, allocators
from specbuild.runtime.engine_dir.manifest import CacheGroup, Limits
from specbuild.runtime.errors import SpecbuildError

PrefixKey = NewType("PrefixKey", int)


@dataclass(slots=True, eq=False)
class SequencePrefix:
    """The beginning of one sequence in a cache: its pages' keys, as far as its tokens are known.

    ``published`` pages of a group are in the cache, or were when the sequence was there.
    """

    cache: PrefixCache
    ids: np.ndarray
    prompt_tokens: int
    salt: str | None
    keys: list[PrefixKey] = field(default_factory=list)
    published: dict[str, int] = field(default_factory=dict)
    # The sum behind the last key.
    total: int = 0
    # Whose tokens equal this one's, and up to where.
    equal: tuple[SequencePrefix | None, int] = (None, 0)


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """Page ``index`` of a beginning: its pages by allocator, made from the tokens of ``origin``."""

    origin: SequencePrefix
    index: int
    pages: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MatchResult:
    """So many tokens of a prompt are there: in these pages, by allocator."""

    tokens: int = 0
    shared: Mapping[str, SharedPages] = field(default_factory=dict)


@dataclass
class PrefixStatistics:
    """Counted since the engine was opened: prompts that were admitted, their tokens, and pages."""

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    published_pages: int = 0
    evicted_pages: int = 0

    @property
    def misses(self) -> int:
        """Prompts of which nothing was there."""
        return self.queries - self.hits


@dataclass(frozen=True)
class PrefixLookup:
    """The cache as a loop asks it; ``drafted``: its prompts want the draft's pages too."""

    cache: PrefixCache
    drafted: bool

    def match(self, prefix: SequencePrefix) -> MatchResult:
        """As :meth:`PrefixCache.match`."""
        return self.cache.match(prefix, drafted=self.drafted)

    def awaits(self, prefix: SequencePrefix, reading: Iterable[SequencePrefix]) -> bool:
        """Whether one of those that are read will publish pages of this prompt."""
        return any(
            self.cache.is_behind(other, common_pages(prefix, other), drafted=self.drafted)
            for other in reading
        )


def common_pages(one: SequencePrefix, other: SequencePrefix) -> int:
    """With how many pages both prompts begin, by their keys, short of either's last token.

    A key names all up to its page, so the last common one is found by halving.
    """
    most = min(len(one.keys), len(other.keys))
    return bisect_left(range(most), True, key=lambda page: one.keys[page] != other.keys[page])


class PrefixCache:
    """Of one engine whose sequences take pages as they grow. For the engine's thread alone.

    :meth:`begin` names a prompt's pages, :meth:`match` finds those that are there, and
    :meth:`publish` is told how far a sequence's caches are filled. A page is published once every
    position in it is committed and the token behind it is known; generated tokens' pages only with
    ``publish_generated``: decoding may round otherwise than reading a prompt does.

    Raises SpecbuildError where the groups' pages are of several sizes.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        limits: Limits,
        kv: KvPools,
        *,
        drafts: bool,
        publish_generated: bool = False,
    ) -> None:
        sizes = {group.page_size for group in groups}
        if len(sizes) > 1:
            raise SpecbuildError(f"a prefix cache wants pages of one size, not {sorted(sizes)}")
        (self.page_size,) = sizes
        self.statistics = PrefixStatistics()
        self.publish_generated = publish_generated
        windows = {group.name: group.window for group in groups}
        names = list(allocators(groups))
        self._windows = {name: windows[name] for name in names}
        self._names = {
            False: [name for name in names if name != DRAFT_GROUP],
            True: [name for name in names if name == DRAFT_GROUP],
        }
        self._pools = {name: kv.pools[name] for name in names}
        self._drafts = drafts
        self._entries: dict[PrefixKey, PrefixEntry] = {}
        self._of_page: dict[str, dict[int, PrefixKey]] = {name: {} for name in names}
        for name, pool in self._pools.items():
            pool.evicted = self._forgetter(name)
        random = np.random.default_rng()
        pages = limits.max_seq_len // self.page_size + 1
        self._factors = random.integers(1 << 63, size=self.page_size + 1, dtype=np.uint64) * 2 + 1
        base = np.full(pages, random.integers(1 << 63, dtype=np.uint64) * 2 + 1, np.uint64)
        self._powers = np.cumprod(base, dtype=np.uint64)
        self._secret = random.bytes(32)

    def begin(self, prompt_ids: Sequence[int], salt: str | None) -> SequencePrefix:
        """A prompt's pages, named. Those of another salt are never seen."""
        digest = hashlib.blake2b(
            b"" if salt is None else b"+" + salt.encode("utf-8", "surrogatepass"),
            digest_size=8,
            key=self._secret,
        )
        total = int.from_bytes(digest.digest(), "little")
        ids = np.array(prompt_ids, np.int32)
        prefix = SequencePrefix(self, ids, len(prompt_ids), salt, total=total)
        self._name_pages(prefix, len(prompt_ids))
        return prefix

    def match(self, prefix: SequencePrefix, *, drafted: bool) -> MatchResult:
        """The longest beginning that is there, of all but the prompt's last token.

        For every group that keeps all positions its pages from 0 on, for a window those that the
        next token sees; the draft's too where ``drafted``.
        """
        names = self._names[False] + (self._names[True] if drafted else [])
        whole = {name for name in names if not self._windows[name]}
        found: list[PrefixEntry] = []
        for key in prefix.keys[: (prefix.prompt_tokens - 1) // self.page_size]:
            entry = self._entries.get(key)
            if entry is None or not whole <= entry.pages.keys():
                break
            found.append(entry)
        count = self._same(prefix, found)
        windowed = [name for name in names if self._windows[name]]
        while count:
            missing = [m for name in windowed if (m := self._missing(name, found, count)) >= 0]
            if not missing:
                break
            count = max(missing)
        shared = {
            name: SharedPages(first, tuple(e.pages[name] for e in found[first:count]))
            for name in names
            for first in (self._first(name, count),)
        }
        return MatchResult(count * self.page_size, shared) if count else MatchResult()

    def admitted(self, prefix: SequencePrefix, match: MatchResult, *, again: bool) -> None:
        """Its sequence begins behind what was found; ``again``: it was preempted."""
        prefix.published = dict.fromkeys(match.shared, match.tokens // self.page_size)
        if not again:
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
        known: int,
        draft: bool = False,
    ) -> None:
        """The target's caches hold ``length`` tokens of the sequence, or the draft's do.

        ``ids[:known]`` are its tokens. Called before a window's pages go back.
        """
        most = known if self.publish_generated else min(known, prefix.prompt_tokens)
        end = min(length, most - 1) // self.page_size
        if end > len(prefix.keys):
            prefix.ids = ids
            self._name_pages(prefix, most)
        for name in self._names[draft]:
            published, holder = prefix.published.get(name, 0), holders[name]
            first = max(published, holder.first_page)
            if first < end:
                self._insert(prefix, name, first, holder.table[first:end].tolist())
            prefix.published[name] = max(published, end)

    def wanted_draft(self, prefix: SequencePrefix, known: int) -> int:
        """Up to where the draft is to take up a prompt of which ``known`` tokens are known."""
        return (min(known, prefix.prompt_tokens) - 1) // self.page_size * self.page_size

    def is_behind(self, prefix: SequencePrefix, pages: int, *, drafted: bool) -> bool:
        """Whether a sequence has not published so many of its first pages yet."""
        names = self._names[False] + (self._names[True] if drafted else [])
        return any(prefix.published.get(name, 0) < pages for name in names)

    def check_integrity(self) -> None:
        """For an idle engine: SpecbuildError unless all pages are free, or kept under their key."""
        for name, pool in self._pools.items():
            pool.check_integrity()
            keys = self._of_page[name]
            held = {key for key, entry in self._entries.items() if name in entry.pages}
            if len(keys) != pool.kept_pages or set(keys.values()) != held:
                raise SpecbuildError(
                    f"cache group {name}: {pool.kept_pages} pages are kept, but {len(keys)} have a "
                    f"key and {len(held)} an entry; please report it"
                )

    def _name_pages(self, prefix: SequencePrefix, known: int) -> None:
        """Keys of the pages behind which a token is known, as far as there are ``known``."""
        size, first, end = self.page_size, len(prefix.keys), (known - 1) // self.page_size
        if end <= first:
            return
        tokens = prefix.ids[first * size : end * size + 1].astype(np.uint64) + np.uint64(1)
        sums = (tokens[:-1].reshape(-1, size) * self._factors[:size]).sum(axis=1)
        if self._drafts:
            sums += tokens[size::size] * self._factors[size]
        sums ^= sums >> np.uint64(29)
        totals = np.cumsum(sums * self._powers[first:end], dtype=np.uint64) + np.uint64(
            prefix.total
        )
        prefix.keys += [PrefixKey(key) for key in totals.tolist()]
        prefix.total = int(totals[-1])

    def _same(self, prefix: SequencePrefix, found: Sequence[PrefixEntry]) -> int:
        """How many of the entries, from the first on, were made from the tokens of ``prefix``.

        Those that were made together are compared together.
        """
        same = 0
        while same < len(found):
            origin, end = found[same].origin, same
            while end < len(found) and found[end].origin is origin and found[end].index == end:
                end += 1
            if end == same or not self._equal(prefix, origin, end - 1):
                break
            same = end
        return same

    def _equal(self, prefix: SequencePrefix, origin: SequencePrefix, index: int) -> bool:
        """Whether two beginnings are the same up to the end of a page, and the token behind it."""
        if prefix is origin:
            return True
        end = (index + 1) * self.page_size + self._drafts
        first = prefix.equal[1] if prefix.equal[0] is origin else 0
        same = prefix.salt == origin.salt and bool(
            np.array_equal(prefix.ids[first:end], origin.ids[first:end])
        )
        prefix.equal = (origin, max(first, end)) if same else (None, 0)
        return same

    def _missing(self, name: str, found: Sequence[PrefixEntry], count: int) -> int:
        """The last page that a window before page ``count`` sees and that is not there, or −1."""
        seen = range(count - 1, self._first(name, count) - 1, -1)
        return next((i for i in seen if name not in found[i].pages), -1)

    def _first(self, name: str, count: int) -> int:
        """The first page that the token behind ``count`` pages sees in a group."""
        window = self._windows[name]
        return max(0, count * self.page_size - window + 1) // self.page_size if window else 0

    def _insert(self, prefix: SequencePrefix, name: str, first: int, pages: Sequence[int]) -> None:
        """Pages from ``first`` on get their keys, up to one whose key another beginning has."""
        entries, inserted = self._entries, {}
        keys = prefix.keys[first : first + len(pages)]
        for index, (key, page) in enumerate(zip(keys, pages, strict=True), first):
            entry = entries.get(key)
            if entry is None:
                entries[key] = PrefixEntry(prefix, index, {name: page})
            elif entry.index == index and self._equal(prefix, entry.origin, index):
                if name in entry.pages:
                    continue
                entry.pages[name] = page
            else:
                break
            inserted[page] = key
        self._of_page[name].update(inserted)
        self._pools[name].keep(inserted)
        self.statistics.published_pages += len(inserted)

    def _forgetter(self, name: str) -> Callable[[int], None]:
        keys = self._of_page[name]

        def forget(page: int) -> None:
            key = keys.pop(page)
            entry = self._entries[key]
            del entry.pages[name]
            if not entry.pages:
                del self._entries[key]
            self.statistics.evicted_pages += 1

        return forget
