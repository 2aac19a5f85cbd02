"""Pages that remain, and pages that launches allocate on demand; every page has one owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_ledger import PageLedger
from toy_model import toy_manifest

from specbuild.runtime.cache.page_pool import PagePool
from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.sequence_pages import FixedPages, RingPages
from specbuild.runtime.decode.device.pages import DevicePages
from specbuild.runtime.decode.device.rows import DeviceRows
from specbuild.runtime.decode.scoring import scored_sequence
from specbuild.runtime.engine_dir.cache_groups import pages_per_sequence
from specbuild.runtime.engine_dir.manifest import Limits, SpecPv
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.request import SequenceState


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 200),
    st.sampled_from([1, 2, 4, 16]),
    st.integers(0, 40),
    st.integers(1, 48),
    st.integers(0, 20),
    st.data(),
)
def test_a_launch_does_not_overwrite_visible_slots(
    tokens: int, size: int, window: int, rows: int, tree: int, data: st.DataObject
) -> None:
    """All rows are written before any is read: window and rows must have different slots."""
    limits = Limits(200, 1, rows, 1, 1, tree)
    pages = pages_per_sequence("g", limits, tokens=tokens, page_size=size, window=window)
    pool = PagePool("g", pages + 1)
    kind = RingPages if window else FixedPages
    holder = kind(pool, page_size=size, window=window, capacity=240, reserved=pages)
    holder.append(tokens + tree + 1)
    assert pool.free_pages == 0
    first = data.draw(st.integers(0, tokens - 1))
    count = data.draw(st.integers(1, min(rows, tokens - first) if first else min(rows, tokens)))
    if data.draw(st.booleans()):  # a tree behind all but one token
        first, count = min(first, tokens), min(tree + 1, max(rows, tree + 1))
    holder.commit(first)
    holder.append(count)
    seen = range(max(0, first - window + 1) if window else 0, first + count)
    slots = holder.slots[seen.start : seen.stop]
    assert len(set(slots.tolist())) == len(slots)
    assert (slots // size > 0).all(), "page 0 belongs to nobody"
    for slot in seen:
        assert holder.slots[slot] == holder.table[slot // size] * size + slot % size
    holder.release()
    assert pool.free_pages == pages
    assert not holder.table.any()


def test_the_table_is_there_at_once_and_stays() -> None:
    manifest = toy_manifest(max_seq_len=60, page_size=4)
    kv = KvPools(manifest.cache_groups, manifest.limits, fixed=True)
    wanted = kv.pages_needed(30)
    pages = kv.admit(wanted)
    tables = {name: holder.table.copy() for name, holder in pages.items()}
    assert {n: len(set(t[t > 0].tolist())) for n, t in tables.items()} == wanted
    full, sliding = tables["full"], tables["sliding"]
    assert (full[: wanted["full"]] > 0).all()
    assert not full[wanted["full"] :].any()
    assert (sliding == sliding[np.arange(len(sliding)) % wanted["sliding"]]).all()
    for length in (7, 29):
        for name, holder in pages.items():
            holder.append(length - holder.length)
            holder.commit(length)
            assert (holder.table == tables[name]).all()
    with pytest.raises(SpecbuildError, match=r"pages requested, \d+ reserved"):
        pages["full"].append(25)
    kv.release(pages)
    assert all(kv.can_admit({n: p.free_pages}) for n, p in kv.pools.items())


def test_a_ledger_lists_every_owner() -> None:
    ledger, manifest = PageLedger(), toy_manifest()
    groups, limits = manifest.cache_groups, manifest.limits
    kv = KvPools(groups, limits, ledger.released, ledger.installed, fixed=True)
    wanted = kv.pages_needed(9)
    first, second = kv.admit(wanted), kv.admit(wanted)
    assert len(ledger.held) == 2 * sum(wanted.values())
    assert len(set(ledger.held.values())) == len(ledger.held)
    kv.release(first)
    held = set(second["full"].table.tolist()) - {0}
    assert {page for group, page in ledger.held if group == "full"} == held
    kv.release(second)
    assert not ledger.held
    ledger.installed("full", [3])
    with pytest.raises(SpecbuildError, match="page 3 is given away twice"):
        ledger.installed("full", [3])
    with pytest.raises(SpecbuildError, match="page 4 comes back, but was free"):
        ledger.released("full", [4])
    with pytest.raises(SpecbuildError, match="page 0"):
        ledger.installed("full", [0])


class Written:
    """Rows of a device that record which tables of which groups are written."""

    def __init__(self) -> None:
        self.groups: list[str] = []

    def write_tables(self, sequence: SequenceState, groups: Sequence[str]) -> None:
        assert sequence.request.id == "score"
        self.groups += groups


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("tokens", [31, 35, 39, 40])
def test_pages_are_assigned_before_the_launch_that_writes_them(views: bool, tokens: int) -> None:
    """With views all pages: a view names pages that are written much later."""
    manifest = toy_manifest()
    if views:
        manifest = replace(manifest, specpv=SpecPv(4, 1, 2, 1, 4, 8, 2))
    kv = KvPools(manifest.cache_groups, manifest.limits, ahead=True)
    rows = Written()
    pages = DevicePages(cast(DeviceRows, rows), manifest)
    with scored_sequence(range(tokens), kv) as sequence:
        for end in [*range(8, tokens, 8), tokens]:
            pages.before_prefill(sequence, end)
            for holder in sequence.pages.values():
                seen = max(0, sequence.length - holder.window + 1) if holder.window else 0
                assert holder.table[seen // 4 : -(-end // 4)].all()
            full = sequence.pages["full"]
            assert (full.end_page == full.reserved) or not views
            sequence.length = end
            pages.after_prefill(sequence)
        assert sequence.pages["sliding"].first_page == (tokens - 5) // 4
    # One write for each time that a table has grown.
    assert rows.groups.count("full") == 1 if views else 1 < rows.groups.count("full") < 5
    assert all(pool.free_pages == pool.pages for pool in kv.pools.values())


def test_a_step_frees_each_page_that_leaves_the_window() -> None:
    manifest = toy_manifest()
    kv = KvPools(manifest.cache_groups, manifest.limits, ahead=True)
    pages = DevicePages(cast(DeviceRows, Written()), manifest)
    with scored_sequence(range(40), kv) as sequence:
        pages.before_prefill(sequence, 9)
        sequence.length = 9
        pages.after_prefill(sequence)
        sliding = sequence.pages["sliding"]
        for length in range(10, 40):
            sequence.num_tokens = length + 1
            pages.before_step([sequence], 0)
            sequence.length = length
            pages.after_step(sequence, 0)
            assert sliding.first_page == (length - sliding.window + 1) // sliding.page_size
            assert sliding.end_page * sliding.page_size > length
    assert all(pool.free_pages == pool.pages for pool in kv.pools.values())
