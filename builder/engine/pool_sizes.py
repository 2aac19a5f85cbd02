"""The number of pages of each cache group: for the worst case, or for less memory."""

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
    """The memory of caches: total bytes, or pages of each group without a window.

    By default it is the worst case, every sequence at its maximum length. ``places`` is the number
    of copies of each pool. The bytes are those of one of ``ranks`` GPUs that share the heads.
    """

    memory: int | None = None
    pages: int | None = None
    places: int = 1
    ranks: int = 1

    def sized(
        self, groups: Sequence[CacheGroup], limits: Limits, specpv: SpecPv | None
    ) -> tuple[CacheGroup, ...]:
        """Return the groups with their pages, including page 0.

        Groups with a window have pages for the largest launch of every sequence; no group exceeds
        the worst case. Raises SpecbuildError if one sequence of maximum length does not fit, and
        for sizes above 32 bits.
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
        """Return equal token numbers for the groups without a window, in the remaining memory."""

        def holding(tokens: int) -> tuple[CacheGroup, ...]:
            return tuple(_with_pages(g, limits, -(-tokens // g.page_size)) for g in worst)

        def size(found: Sequence[CacheGroup]) -> int:
            own = groups_of_rank(found, self.ranks)
            return self.places * sum(group_bytes(group, specpv) for group in own)

        step = max(g.page_size for g in worst)
        unwindowed = [g for g in worst if not g.window]
        fewest = max((g.page_size * _fewest(g, limits) for g in unwindowed), default=0)
        if size(holding(fewest)) > memory:
            raise SpecbuildError(
                f"--kv-memory of {_mebibytes(memory)}: the caches of one sequence of "
                f"{limits.max_seq_len} tokens, and a page for each of {limits.max_batch_size}, "
                f"take {_mebibytes(size(holding(fewest)))}; ask for more, or for less "
                "--max-seq-len or --max-batch-size"
            )
        limit = max((g.page_size * g.pages for g in unwindowed), default=0)
        low, high = fewest // step, limit // step
        while low < high:
            middle = (low + high + 1) // 2
            if size(holding(middle * step)) <= memory:
                low = middle
            else:
                high = middle - 1
        return holding(low * step)


def state_groups(target: TargetGeometry, limits: Limits, dtype: str) -> tuple[StateGroup, ...]:
    """Return the recurrent states of the target: a slot per sequence, and two reserved ones."""
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
    """Return the slots of recurrent states for a full batch, including the two reserved ones."""
    return limits.max_batch_size + 2


def _require_countable(groups: Sequence[CacheGroup], limits: Limits) -> None:
    """Raise SpecbuildError if a launch has more rows, or a cache more tokens, than 32 bits."""
    largest = max((group.pages * group.page_size for group in groups), default=0)
    if max(largest, limits.max_rows) > MAX_INTEGER:
        raise SpecbuildError(
            f"--max-batch-size {limits.max_batch_size} with sequences of {limits.max_seq_len} "
            f"tokens: the largest cache would hold {largest} tokens and a launch "
            f"{limits.max_rows} rows, at most {MAX_INTEGER} are possible; ask for less "
            "--max-batch-size, --max-seq-len or --page-size"
        )


def _require_fewest(groups: Sequence[CacheGroup], limits: Limits, pages: int) -> None:
    """Raise SpecbuildError if the pages do not fit a sequence of maximum length."""
    needed = max((_fewest(g, limits) for g in groups if not g.window), default=0)
    if pages < needed:
        raise SpecbuildError(
            f"--kv-pages {pages}: a sequence of {limits.max_seq_len} tokens, and a page for each "
            f"of {limits.max_batch_size}, take {needed}; ask for as many at least, or for less "
            "--max-seq-len or --max-batch-size"
        )


def _with_pages(group: CacheGroup, limits: Limits, limit: int | None = None) -> CacheGroup:
    """Return the group with pages for the worst case, at most ``limit`` without a window."""
    pages = limits.max_batch_size * _longest(group, limits)
    if limit is not None and not group.window:
        pages = min(pages, limit)
    return replace(group, pages=pages + 1)


def _fewest(group: CacheGroup, limits: Limits) -> int:
    """Return the pages of one sequence of maximum length, and at least one per sequence."""
    return max(_longest(group, limits), limits.max_batch_size)


def _longest(group: CacheGroup, limits: Limits) -> int:
    """Return the pages of a sequence of maximum length."""
    return group_pages(group, limits, tokens=limits.max_seq_len)


def _mebibytes(size_bytes: int) -> str:
    """Return the quotient, rounded up."""
    return f"{-(-size_bytes * 10 // 2**20) / 10:.1f} MiB"
