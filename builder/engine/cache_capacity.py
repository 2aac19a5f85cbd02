"""What the caches of an engine hold: pages and tokens of each group, and sequences together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbuild.runtime.engine_dir.cache_groups import sequences_together
from specbuild.runtime.engine_dir.manifest import CacheGroup, Limits

_LENGTHS = (1024, 4096)


@dataclass(frozen=True)
class GroupCapacity:
    """A group's pages for sequences, page 0 apart, and the tokens that they hold."""

    pages: int
    tokens: int


@dataclass(frozen=True)
class Together:
    """How many sequences that may each reach ``tokens`` tokens run at once.

    ``guaranteed_no_evict`` reserve all that they may need; with ``max_utilization`` they hold what
    they have, which is half of it on average where they began at different times.
    """

    tokens: int
    guaranteed_no_evict: int
    max_utilization: int


@dataclass(frozen=True)
class CacheCapacity:
    """The capacity of every group, by name, and sequences together at several lengths."""

    groups: dict[str, GroupCapacity]
    sequences: tuple[Together, ...]


def cache_capacity(
    groups: Sequence[CacheGroup], limits: Limits, *, lossy: bool = False
) -> CacheCapacity:
    """Predicted for the longest length, and for 1024 and 4096 tokens where these are shorter.

    Engines with a ``lossy`` mode reserve all pages by either policy.
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
