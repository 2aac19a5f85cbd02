"""A bounded store of earlier requests' texts for suffix decoding, separate by cache salt."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from specbuild.runtime.draft.suffix_tree import SuffixTree


@dataclass
class SuffixStatistics:
    """Counters: tokens proposed and accepted, those from texts of earlier requests, and the tokens
    of texts that are stored and that were evicted."""

    proposed_tokens: int = 0
    accepted_tokens: int = 0
    cached_proposed_tokens: int = 0
    cached_accepted_tokens: int = 0
    kept_tokens: int = 0
    evicted_tokens: int = 0


@dataclass
class _SaltTexts:
    tree: SuffixTree
    texts: deque[list[int]]


class SuffixCache:
    """Stores up to ``max_tokens`` tokens of texts; 0 stores none.

    A full cache evicts the oldest text of the least recently used salt.
    """

    def __init__(self, max_depth: int, max_tokens: int, statistics: SuffixStatistics) -> None:
        self._max_depth, self._most = max_depth, max_tokens
        self._statistics = statistics
        self._by_salt: OrderedDict[str | None, _SaltTexts] = OrderedDict()

    def tree(self, salt: str | None) -> SuffixTree | None:
        """Return the tree of a salt's texts and mark it as used; None without texts."""
        kept = self._by_salt.get(salt)
        if kept is None:
            return None
        self._by_salt.move_to_end(salt)
        return kept.tree

    def add(self, salt: str | None, text: Sequence[int]) -> None:
        """Store a text, or its end if it exceeds the capacity."""
        if self._most <= 1 or not text:
            return
        kept = self._by_salt.get(salt)
        if kept is None:
            kept = self._by_salt[salt] = _SaltTexts(SuffixTree(self._max_depth), deque())
        self._by_salt.move_to_end(salt)
        kept.texts.append(kept.tree.add(text[-(self._most - 1) :]))
        self._statistics.kept_tokens += len(kept.texts[-1])
        while self._statistics.kept_tokens > self._most:
            self._evict()

    def _evict(self) -> None:
        salt, oldest = next(iter(self._by_salt.items()))
        text = oldest.texts.popleft()
        oldest.tree.remove(text)
        self._statistics.kept_tokens -= len(text)
        self._statistics.evicted_tokens += len(text)
        if not oldest.texts:
            del self._by_salt[salt]
