"""The capacity of an engine's caches: pages and tokens of each group, and max sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbuild.runtime.engine_dir.cache_groups import sequences_together
from specbuild.runtime.engine_dir.manifest import CacheGroup, Limits

_LENGTHS = (1024, 4096)


@dataclass(frozen=True)
class GroupCapacity:
    """A group's pages for sequences, without page 0, and their number of tokens."""

    pages: int
    tokens: int


@dataclass(frozen=True)
class Together:
    """The number of concurrent sequences that may each reach ``tokens`` tokens.

    With ``guaranteed_no_evict`` each reserves its maximum. With ``max_utilization`` each has the
    pages that it uses, which is half of the maximum on average if their starts are spread.
    """

    tokens: int
    guaranteed_no_evict: int
    max_utilization: int


@dataclass(frozen=True)
class CacheCapacity:
    """The capacity of every group, by name, and max concurrent sequences at several lengths."""

    groups: dict[str, GroupCapacity]
    sequences: tuple[Together, ...]


def cache_capacity(
    groups: Sequence[CacheGroup], limits: Limits, *, lossy: bool = False
) -> CacheCapacity:
    """Return the capacity at the maximum length, and at 1024 and 4096 tokens if these are shorter.

    Engines with a ``lossy`` mode reserve all pages with either policy.
    """

    def together(tokens: int) -> Together:
        reserved = sequences_together(groups, limits, tokens)
        half = sequences_together(groups, limits, -(-tokens // 2))
        return Together(tokens, reserved, reserved if lossy else half)

    lengths = (*(n for n in _LENGTHS if n < limits.max_seq_len), limits.max_seq_len)
    return CacheCapacity(
        {g.name: GroupCapacity(g.pages - 1, (g.pages - 1) * g.page_size) for g in groups},
        tuple(map(together, lengths)),
    )
