"""A bounded store of the texts of earlier requests, with a separate tree per cache salt."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from specbuild.runtime.draft.suffix_tree import SuffixTree


@dataclass
class SuffixStatistics:
    """Numbers of tokens that suffix decoding proposed, stored and evicted.

    The ``cached_`` fields count only proposals from the texts of earlier requests. ``kept_tokens``
    is the current number of stored tokens.
    """

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
        self._max_depth, self._max_tokens = max_depth, max_tokens
        self._statistics = statistics
        self._by_salt: OrderedDict[str | None, _SaltTexts] = OrderedDict()

    def tree(self, salt: str | None) -> SuffixTree | None:
        """Return the tree of a salt's texts and mark it as used; None without texts."""
        stored = self._by_salt.get(salt)
        if stored is None:
            return None
        self._by_salt.move_to_end(salt)
        return stored.tree

    def add(self, salt: str | None, text: Sequence[int]) -> None:
        """Store a text; of a text that exceeds the capacity, store its last tokens."""
        if self._max_tokens <= 1 or not text:
            return
        stored = self._by_salt.get(salt)
        if stored is None:
            stored = self._by_salt[salt] = _SaltTexts(SuffixTree(self._max_depth), deque())
        self._by_salt.move_to_end(salt)
        stored.texts.append(stored.tree.add(text[-(self._max_tokens - 1) :]))
        self._statistics.kept_tokens += len(stored.texts[-1])
        while self._statistics.kept_tokens > self._max_tokens:
            self._evict()

    def _evict(self) -> None:
        salt, oldest = next(iter(self._by_salt.items()))
        text = oldest.texts.popleft()
        oldest.tree.remove(text)
        self._statistics.kept_tokens -= len(text)
        self._statistics.evicted_tokens += len(text)
        if not oldest.texts:
            del self._by_salt[salt]
