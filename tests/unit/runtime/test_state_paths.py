"""Slots of recurrent states, and the paths of rows through them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_model import toy_manifest

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.state_paths import StateSlot, path_feeds
from specbuild.runtime.draft.tree import DraftTrees, chain_trees, pack_bits
from specbuild.runtime.engine_dir.manifest import StateGroup
from specbuild.runtime.errors import SpecbuildError

BATCH = 3
STATES = StateGroup("recurrent", (0, 2), BATCH + 2, 4, 8, 8, 64, 3, 72, "float32")


def pools() -> KvPools:
    manifest = toy_manifest(max_batch_size=BATCH)
    return KvPools((*manifest.cache_groups, STATES), manifest.limits)


def test_sequences_have_separate_slots_and_release_them() -> None:
    kv = pools()
    needed = kv.pages_needed(4)
    assert needed[STATES.name] == 1
    held = [kv.admit(needed) for _ in range(BATCH)]
    slots = [pages[STATES.name].slot for pages in held]
    assert sorted(slots) == [1, 2, 3]
    assert not kv.can_admit({STATES.name: 1})
    with pytest.raises(SpecbuildError, match="recurrent: 1 pages requested, 0 left"):
        kv.admit(needed)
    kv.release(held[1])
    assert kv.admit(needed)[STATES.name].slot == slots[1]


def test_states_do_not_limit_the_tokens_of_a_sequence() -> None:
    kv, manifest = pools(), toy_manifest(max_batch_size=BATCH)
    without = KvPools(manifest.cache_groups, manifest.limits)
    found = [pools.capacity(pools.admit(pools.pages_needed(9))) for pools in (kv, without)]
    assert found[0] == found[1]
    pages = kv.admit(kv.pages_needed(1))
    assert kv.can_grow(pages, 9)
    kv.grow(pages, 9)
    assert pages[STATES.name].reserved == 1


def test_a_launch_reads_the_empty_slot_until_one_stored_a_state() -> None:
    kv = pools()
    holders = [kv.admit(kv.pages_needed(4))[STATES.name] for _ in range(2)]
    slots = [holder.slot for holder in holders if isinstance(holder, StateSlot)]
    paths = [(0, range(3)), (1, [3])]
    first = path_feeds(STATES, holders, paths, stores=True)
    assert first["recurrent.path_rows"].tolist() == [[0, 1, 2], [3, -1, -1]]
    assert first["recurrent.read_slot"].tolist() == [0, 0]
    assert first["recurrent.write_slot"].tolist() == slots
    tree = path_feeds(STATES, holders, [(0, [0, 1]), (0, [0, 2]), (1, [3])], stores=False)
    assert tree["recurrent.read_slot"].tolist() == [slots[0], slots[0], slots[1]]
    assert tree["recurrent.write_slot"].tolist() == [STATES.discarded] * 3
    assert all(array.dtype == np.int32 for array in tree.values())


@given(st.lists(st.integers(0, 99), max_size=20))
def test_the_paths_of_a_tree_end_at_its_leaves(draws: list[int]) -> None:
    parents = [-1, *(draw % (node + 1) for node, draw in enumerate(draws))]
    count = len(parents)
    columns = np.array([parents], np.int32)
    trees = DraftTrees(
        columns, columns, columns, pack_bits(np.eye(count, dtype=bool))[None],
        np.array([count], np.int32), contiguous=False,
    )  # fmt: skip
    paths = [list(path) for path in trees.leaf_paths(0)]
    assert {path[-1] for path in paths} == set(range(count)) - set(parents)
    assert len({path[-1] for path in paths}) == len(paths)
    for path in paths:
        assert path[0] == 0
        assert [parents[node] for node in path[1:]] == path[:-1]


def test_a_chain_has_one_path() -> None:
    trees = chain_trees([5, 6], np.array([[1, 2], [3, 4]], np.int32)).cut([2, 1])
    assert [list(*trees.leaf_paths(b)) for b in range(2)] == [[0, 1, 2], [0, 1]]
