"""The tree of cached pages, and the order in which a pool evicts pages that a tree continues."""

from __future__ import annotations

import numpy as np
import pytest
from toy_model import VOCAB

from specbuild.runtime.cache.page_pool import PagePool
from specbuild.runtime.cache.prefix_tree import PrefixTree, TokenSource
from specbuild.runtime.errors import SpecbuildError

SIZE = 4


def test_a_page_is_evicted_before_its_parent() -> None:
    pool, gone = PagePool("full", 6), []
    pool.on_evict = gone.append
    pool.reserve(5)
    pages = [pool.allocate(1) for _ in range(5)]
    pool.cache(np.array(pages[:4]))
    pool.release(pages[::-1], 1)
    pool.unreserve(5)
    pool.check_integrity()
    assert (pool.free_pages, pool.cached_pages) == (5, 4)
    pool.share(pages[:1], 2, is_reserved=False)
    assert pool.can_reserve(4) and not pool.can_reserve(5)
    pool.reserve(4)
    assert sorted(pool.allocate(1) for _ in range(4)) == sorted(pages[1:])
    assert gone == pages[3:0:-1]
    with pytest.raises(SpecbuildError, match="no free page"):
        pool.allocate(1)


def test_a_page_is_kept_as_long_as_its_children() -> None:
    """Pages 1 and 2 were released first, and 3, which continues them, last."""
    pool, gone = PagePool("full", 5), []
    behind = {1: [2], 2: [3], 3: [], 4: []}
    pool.on_evict = gone.append
    pool.children = lambda page: [each for each in behind[page] if each not in gone]
    pool.reserve(4)
    pages = [pool.allocate(1) for _ in range(4)]
    pool.cache(np.array(pages))
    for page in (2, 1, 4, 3):
        pool.release([page], 1)
    assert [pool.allocate(2) for _ in range(4)] == gone == [4, 3, 2, 1]


def test_the_owner_of_a_shared_page_may_release_it_first() -> None:
    """The reservation is gone. Sharers keep the page, and no other sequence can get it."""
    pool = PagePool("full", 4)
    pool.reserve(1)
    page = pool.allocate(1)
    pool.cache(np.array([page]))
    pool.share([page], 2, is_reserved=False)
    assert pool.can_reserve(2)
    pool.transfer_reservation([page])
    pool.release([page], 1)
    pool.unreserve(1)
    assert pool.can_reserve(2) and not pool.can_reserve(3)
    pool.release([page], 2)
    pool.check_integrity()


def test_an_entry_ends_at_the_first_different_token() -> None:
    """Pages are equal if all tokens up to their end are, and with a draft the next one."""
    ids = np.random.default_rng(0).integers(0, VOCAB, 41, np.int32)
    for drafts in (False, True):
        tree = PrefixTree([20], page_size=SIZE, drafts=drafts)
        source = TokenSource(ids, None)
        (span,) = tree.walk_or_add(source, 10)
        assert (span.first, span.end) == (0, 10) and not tree.walk(TokenSource(ids, "salt"), 10)
        for changed in range(41):
            other = ids.copy()
            other[changed] += 1
            same = [(s.first, s.end) for s in tree.walk(TokenSource(other, None), 10)]
            pages = max(0, changed - drafts) // SIZE
            assert same == ([(0, min(pages, 10))] if pages else [])


def test_an_entry_with_children_is_not_pruned() -> None:
    """Pages of a window are evicted before those of the branches that continue it."""
    tree = PrefixTree([20], page_size=SIZE, drafts=False)
    ids = np.arange(41, dtype=np.int32)
    other = np.concatenate([ids[: 4 * SIZE], ids[4 * SIZE :] + 1])
    source, continued = TokenSource(ids, None), TokenSource(other, None)
    (span,) = tree.walk_or_add(source, 10)
    *_, branch = tree.walk_or_add(continued, 10)
    assert (branch.first, branch.end) == (4, 10)
    tree.place(0, branch, np.arange(1, 7, dtype=np.int32))
    tree.prune(span.entry)
    assert [(s.first, s.end) for s in tree.walk(continued, 10)] == [(0, 4), (4, 10)]
    tree.check_integrity()
