"""Pages have one owner, are released, and follow the window: compared with a model of sets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from page_ledger import PageLedger
from toy_model import toy_manifest

from specbuild.runtime.cache.page_pool import PagePool
from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.row_placement import RowLayout, SlotCounter, cache_feeds
from specbuild.runtime.cache.sequence_pages import SequencePages
from specbuild.runtime.errors import SpecbuildError

SIZE, MAX_LEN, WINDOWS = 4, 40, {"full": 0, "sliding": 6, "draft": 0}


class PagesMachine(RuleBasedStateMachine):
    """Sequences start, grow, commit, rewind and end. The model knows which slots are required."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.manifest = toy_manifest(max_seq_len=MAX_LEN, max_batch_size=3, page_size=SIZE)
        self.released: list[tuple[str, int]] = []
        self.kv = KvPools(
            self.manifest.cache_groups,
            self.manifest.limits,
            lambda group, pages: self.released.extend((group, p) for p in pages),
        )
        self.all_pages = {g.name: set(range(1, g.pages)) for g in self.manifest.cache_groups}
        self.running: list[dict] = []

    @rule(target=sequences, tokens=st.integers(1, MAX_LEN))
    def admit(self, tokens: int) -> dict | None:
        wanted = self.kv.pages_needed(tokens)
        if not self.kv.can_admit(wanted):
            assert len(self.running) >= 3, "pages for a full batch must be there"
            return None
        pages = self.kv.admit(wanted)
        state = {"pages": pages, "wanted": wanted, "length": 0, "tokens": tokens, "capacity": 0}
        self.running.append(state)
        return state

    @rule(state=sequences, rows=st.integers(1, 13))
    def append(self, state: dict | None, rows: int) -> None:
        if not self._alive(state):
            return
        tree = min(self.manifest.limits.draft_tokens + 1, 9)
        rows = min(rows, self.manifest.limits.max_rows, state["tokens"] - state["length"] + tree)
        for holder in state["pages"].values():
            holder.append(rows)
        state["capacity"] = max(state["capacity"], rows)

    @rule(state=sequences, share=st.floats(0, 1))
    def commit(self, state: dict | None, share: float) -> None:
        if not self._alive(state):
            return
        kept = min(int(state["capacity"] * share), state["tokens"] - state["length"])
        state["length"] += kept
        state["capacity"] = 0
        for holder in state["pages"].values():
            holder.commit(state["length"])

    @rule(state=sequences, back=st.integers(0, 10))
    def rewind(self, state: dict | None, back: int) -> None:
        if not self._alive(state):
            return
        length = max(0, state["length"] - back)
        gone = {
            name: self._first_page(name, length) < holder.first_page
            for name, holder in state["pages"].items()
        }
        if any(gone.values()):
            name = next(n for n in gone if gone[n])
            with pytest.raises(SpecbuildError, match="freed"):
                state["pages"][name].rewind(length)
            return
        for holder in state["pages"].values():
            holder.rewind(length)
        state["length"], state["capacity"] = length, 0

    @rule(state=consumes(sequences))
    def release(self, state: dict | None) -> None:
        if self._alive(state):
            self.running.remove(state)
            self.kv.release(state["pages"])

    def _alive(self, state: dict | None) -> bool:
        return any(state is other for other in self.running)

    def _first_page(self, group: str, length: int) -> int:
        window = WINDOWS[group]
        return max(0, length - window + 1) // SIZE if window else 0

    @invariant()
    def pages_have_one_owner(self) -> None:
        for name, pool in self.kv.pools.items():
            held = [page for s in self.running for page in s["pages"][name].table if page]
            assert len(held) == len(set(held)), "a page has two owners"
            assert set(held) <= self.all_pages[name]
            assert pool.free_pages == len(self.all_pages[name]) - len(held)

    @invariant()
    def sequences_hold_what_they_see(self) -> None:
        for state in self.running:
            for name, holder in state["pages"].items():
                end = -(-(state["length"] + state["capacity"]) // SIZE)
                first = min(self._first_page(name, state["length"]), -(-state["length"] // SIZE))
                assert (holder.first_page, holder.end_page) == (first, max(end, first))
                live = np.flatnonzero(holder.table)
                assert live.tolist() == list(range(first, max(end, first)))
                for slot in range(first * SIZE, end * SIZE):
                    page = holder.table[slot // SIZE]
                    assert holder.slots[slot] == page * SIZE + slot % SIZE
                assert np.count_nonzero(holder.table) <= state["wanted"][name]


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_feeds_name_the_live_pages_relative_to_the_window() -> None:
    pool = PagePool("sliding", 30)
    holders = [
        SequencePages(pool, page_size=4, window=6, capacity=64, reserved=9) for _ in range(2)
    ]
    for holder, length in zip(holders, (21, 3), strict=True):
        holder.append(length)
        holder.commit(length)
        holder.append(3)
    assert [h.first_page for h in holders] == [4, 0]
    feeds = cache_feeds("sliding", holders, RowLayout([21, 3], [3, 2], [21, 3]), SlotCounter(80))
    table = feeds["sliding.page_table"]
    assert table.shape == (1, 2, 1, 2)
    assert table[0, 0, 0].tolist() == holders[0].table[4:6].tolist()
    assert feeds["sliding.row_slot"].tolist() == [5, 6, 7, 3, 4]
    assert feeds["sliding.tree_start"].tolist() == [5, 3]
    assert feeds["sliding.page_position"].tolist() == [[16, 20], [0, 4]]
    for write, row, sequence in zip(
        feeds["sliding.write_slot"], feeds["sliding.row_slot"], (0, 0, 0, 1, 1), strict=True
    ):
        assert write == table[0, sequence, 0, row // 4] * 4 + row % 4
    assert all(array.dtype == np.int32 for array in feeds.values())


def test_rejects_a_sequence_beyond_its_pages() -> None:
    holder = SequencePages(PagePool("full", 9), page_size=4, window=0, capacity=8, reserved=2)
    with pytest.raises(SpecbuildError, match="holds 8 slots, 9 requested"):
        holder.append(9)
    holder.append(8)
    with pytest.raises(SpecbuildError, match="commit of 9"):
        holder.commit(9)


def test_a_group_without_pages_does_not_change_others() -> None:
    manifest = toy_manifest(max_batch_size=1)
    pools = KvPools(manifest.cache_groups, manifest.limits)
    wanted = pools.pages_needed(20)
    last = list(wanted)[-1]
    pools.pools[last].reserve(manifest.cache_groups[-1].pages - 2)
    with pytest.raises(SpecbuildError, match=f"cache group {last}: "):
        pools.admit(wanted)
    pools.pools[last].unreserve(manifest.cache_groups[-1].pages - 2)
    for group in manifest.cache_groups:
        assert pools.pools[group.name].can_reserve(group.pages - 1)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 80), st.integers(0, 9)), max_size=25))
def test_groups_without_windows_assign_equal_pages(
    turns: list[tuple[bool, int, int]],
) -> None:
    """On a device, in any order of sequences: views of keys are also views of indexers' keys."""
    limits = replace(toy_manifest().limits, max_seq_len=80, max_batch_size=4)
    full = next(g for g in toy_manifest().cache_groups if g.window == 0)
    groups = [replace(full, name=name, pages=30) for name in ("full", "indexer")]
    ledger, held = PageLedger(), []
    pools = KvPools(groups, limits, ledger.released, ledger.installed, fixed=True)
    for arrives, tokens, leaving in turns:
        wanted = pools.pages_needed(tokens)
        if arrives and pools.can_admit(wanted):
            held.append(pools.admit(wanted))
            assert held[-1]["full"] is held[-1]["indexer"]
        elif held:
            pools.release(held.pop(leaving % len(held)))
        pages = {name: {p for n, p in ledger.held if n == name} for name in pools.pools}
        assert pages["full"] == pages["indexer"]
        assert pools.pools["full"].free_pages == 29 - len(pages["full"])


def test_a_page_holder_with_two_names_may_be_called_twice() -> None:
    """A launch iterates over the groups by name, and appends and commits for each of them."""
    limits = replace(toy_manifest().limits, max_seq_len=80, max_batch_size=4)
    full = next(g for g in toy_manifest().cache_groups if g.window == 0)
    pools = KvPools([replace(full, name=name, pages=30) for name in ("full", "indexer")], limits)
    pages = pools.admit(pools.pages_needed(40))
    for length in (7, 20, 33):
        for holder in pages.values():
            holder.append(length - holder.length + 3)
        for holder in pages.values():
            holder.commit(length)
        assert (pages["full"].length, pages["full"].end_page) == (length, -(-length // SIZE))
        assert pools.pools["indexer"].free_pages == 29 - pages["full"].end_page
    pools.release(pages)
    assert pools.can_admit({"full": 29})
