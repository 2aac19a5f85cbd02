"""How many pages each cache group of an engine has: for the worst case, or for less memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specbuild.builder.option_group import MAX_INTEGER
from specbuild.runtime.device import group_bytes
from specbuild.runtime.engine_dir.cache_groups import group_pages
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.manifest import (
    STATE_GROUP,
    CacheGroup,
    Limits,
    SpecPv,
    StateGroup,
)
from specbuild.runtime.engine_dir.ranks import groups_of_rank
from specbuild.runtime.errors import SpecbuildError


@dataclass(frozen=True)
class PoolBudget:
    """What the caches may take: bytes of all, or pages of each group that keeps every position.

    Neither is the worst case, every sequence at its longest. ``places`` of each pool are counted.
    The bytes are those of one of ``ranks`` GPUs that share the heads.
    """

    memory: int | None = None
    pages: int | None = None
    places: int = 1
    ranks: int = 1

    def sized(
        self, groups: Sequence[CacheGroup], limits: Limits, specpv: SpecPv | None
    ) -> tuple[CacheGroup, ...]:
        """The groups with their pages, page 0 included.

        Windows have pages for the largest launch of every sequence; no group gets more than the
        worst case. Raises SpecbuildError where one sequence of the longest length has no place, and
        for sizes that 32 bits do not hold.
        """
        found = self._sized(groups, limits, specpv)
        _require_countable(found, limits)
        return found

    def _sized(
        self, groups: Sequence[CacheGroup], limits: Limits, specpv: SpecPv | None
    ) -> tuple[CacheGroup, ...]:
        if self.memory is not None and self.pages is not None:
            raise SpecbuildError("--kv-memory and --kv-pages are two ways to say it; give one")
        if self.pages is not None:
            _require_fewest(groups, limits, self.pages)
            return tuple(_with_pages(g, limits, self.pages) for g in groups)
        worst = tuple(_with_pages(g, limits) for g in groups)
        if self.memory is None:
            return worst
        return self._within_memory(worst, limits, specpv, self.memory)

    def _within_memory(
        self, worst: Sequence[CacheGroup], limits: Limits, specpv: SpecPv | None, memory: int
    ) -> tuple[CacheGroup, ...]:
        """As many tokens in every group that keeps all as fit beside the windows' pages."""

        def holding(tokens: int) -> tuple[CacheGroup, ...]:
            return tuple(_with_pages(g, limits, -(-tokens // g.page_size)) for g in worst)

        def size(found: Sequence[CacheGroup]) -> int:
            own = groups_of_rank(found, self.ranks)
            return self.places * sum(group_bytes(group, specpv) for group in own)

        step = max(g.page_size for g in worst)
        kept = [g for g in worst if not g.window]
        fewest = max((g.page_size * _fewest(g, limits) for g in kept), default=0)
        if size(holding(fewest)) > memory:
            raise SpecbuildError(
                f"--kv-memory of {_mebibytes(memory)}: the caches of one sequence of "
                f"{limits.max_seq_len} tokens, and a page for each of {limits.max_batch_size}, "
                f"take {_mebibytes(size(holding(fewest)))}; ask for more, or for less "
                "--max-seq-len or --max-batch-size"
            )
        most = max((g.page_size * g.pages for g in kept), default=0)
        low, high = fewest // step, most // step
        while low < high:
            middle = (low + high + 1) // 2
            if size(holding(middle * step)) <= memory:
                low = middle
            else:
                high = middle - 1
        return holding(low * step)


def state_groups(target: TargetGeometry, limits: Limits, dtype: str) -> tuple[StateGroup, ...]:
    """The recurrent states of the target: a slot for every sequence, and two that none has."""
    delta = target.gated_delta
    if delta is None:
        return ()
    states = StateGroup(
        name=STATE_GROUP,
        layers=target.linear_layers,
        slots=slots_for(limits),
        heads=delta.value_heads,
        key_width=delta.key_width,
        value_width=delta.value_width,
        channels=delta.channels,
        tail=delta.taps - 1,
        row_width=delta.row_width,
        dtype=dtype,
    )
    return (states,)


def slots_for(limits: Limits) -> int:
    """Slots of recurrent states for a full batch, the empty and the discarded one included."""
    return limits.max_batch_size + 2


def _require_countable(groups: Sequence[CacheGroup], limits: Limits) -> None:
    """Raise SpecbuildError where a launch has more rows, or a cache more tokens, than 32 bits."""
    largest = max((group.pages * group.page_size for group in groups), default=0)
    if max(largest, limits.max_rows) > MAX_INTEGER:
        raise SpecbuildError(
            f"--max-batch-size {limits.max_batch_size} with sequences of {limits.max_seq_len} "
            f"tokens: the largest cache would hold {largest} tokens and a launch "
            f"{limits.max_rows} rows, at most {MAX_INTEGER} are possible; ask for less "
            "--max-batch-size, --max-seq-len or --page-size"
        )


def _require_fewest(groups: Sequence[CacheGroup], limits: Limits, pages: int) -> None:
    """SpecbuildError where so few pages hold no sequence of the longest length."""
    needed = max((_fewest(g, limits) for g in groups if not g.window), default=0)
    if pages < needed:
        raise SpecbuildError(
            f"--kv-pages {pages}: a sequence of {limits.max_seq_len} tokens, and a page for each "
            f"of {limits.max_batch_size}, take {needed}; ask for as many at least, or for less "
            "--max-seq-len or --max-batch-size"
        )


def _with_pages(group: CacheGroup, limits: Limits, most: int | None = None) -> CacheGroup:
    """The group with pages for every sequence at its longest, but for ``most`` without a window."""
    pages = limits.max_batch_size * _longest(group, limits)
    if most is not None and not group.window:
        pages = min(pages, most)
    return replace(group, pages=pages + 1)


def _fewest(group: CacheGroup, limits: Limits) -> int:
    """Pages of one sequence of the longest length, and no fewer than one for each of a batch."""
    return max(_longest(group, limits), limits.max_batch_size)


def _longest(group: CacheGroup, limits: Limits) -> int:
    """Pages of a sequence of the longest length."""
    return group_pages(group, limits, tokens=limits.max_seq_len)


def _mebibytes(size_bytes: int) -> str:
    """Rounded up: so much is enough."""
    return f"{-(-size_bytes * 10 // 2**20) / 10:.1f} MiB"
