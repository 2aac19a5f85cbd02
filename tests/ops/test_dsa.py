"""DsaIndexer against path replay, DsaCheck against corrupted lists, and both in attention.

The replay walks each row's literal token path and scores its keys one by one in Python. It uses no
masks, bits or sorting networks.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from forms import one_sequence, portable
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from left_out import examples
from test_attention import branches

from specbuild.plugins_cuda.cases import Arrays
from specbuild.plugins_cuda.dsa_indexer.cases import RAGGED, IndexerLaunch, indexer_launch
from specbuild.plugins_cuda.dsa_indexer.reference import indexer_scores
from specbuild.plugins_cuda.paged_tree_attention.body import WHOLE
from specbuild.plugins_cuda.paged_tree_attention.cases import BUSHY, Branch, Launch, chain_of
from specbuild.plugins_cuda.registry import op_named

INDEXER, CHECK = op_named("DsaIndexer"), op_named("DsaCheck")
ATTENTION = op_named("PagedTreeAttention")


def by_reference(launch: IndexerLaunch, arrays: Arrays) -> np.ndarray:
    tensors = [None if a is None else torch.from_numpy(a) for a in arrays]
    result: np.ndarray = INDEXER.reference(*tensors, **launch.attributes).numpy()
    return result


def finite(arrays: Arrays) -> Arrays:
    return tuple(None if a is None else np.nan_to_num(a, nan=1e30) for a in arrays)


def by_body(launch: IndexerLaunch, arrays: Arrays) -> np.ndarray:
    return portable(INDEXER, finite(arrays), launch.attributes)[0]


def replayed(launch: IndexerLaunch, arrays: Arrays) -> list[list[list[int]]]:
    """Return every row's lists without padding."""
    q, weights, pool, table, *_, positions, budget = arrays
    assert q is not None and pool is not None and table is not None
    assert positions is not None and budget is not None
    size, lists = launch.launch.page_size, []
    for row, (sequence, branch, slot, lineage) in enumerate(launch.launch.rows()):
        path = list(range(min(slot + 1, branch.tree_start)))
        path += [branch.tree_start + node for node in lineage]
        if budget[sequence] < 0 or positions[row] < launch.threshold:
            lists.append([[WHOLE]] * table.shape[1])
            continue
        always_listed = set(path[: launch.first_tokens]) & set(range(launch.first_tokens))
        always_listed |= set(path[-launch.recent_tokens :]) | {
            s for s in path if s >= branch.tree_start
        }
        lists.append([])
        for view in table[sequence]:

            def score(s: int, view: np.ndarray = view, row: int = row) -> float:
                key = pool[view[s // size], 0, s % size]
                dots = [max(0.0, float(query @ key)) for query in q[row]]
                shares = [1.0] * len(dots) if weights is None else weights[row].tolist()
                return sum(w * dot for w, dot in zip(shares, dots, strict=True))

            others = sorted(
                (s for s in path if s not in always_listed), key=lambda s: (-score(s), s)
            )
            lists[-1].append(sorted([*always_listed, *others[: budget[sequence]]]))
    return lists


@st.composite
def launches(draw: st.DrawFn) -> IndexerLaunch:
    grown = draw(st.lists(branches(), min_size=1, max_size=3))
    launch = indexer_launch(
        grown,
        *[draw(st.integers(-1, 9)) for _ in grown],
        heads=draw(st.sampled_from([1, 2, 3])),
        weighted=draw(st.booleans()),
        width=draw(st.sampled_from([3, 8])),
        views=draw(st.sampled_from([1, 1, 3])),
        page_size=draw(st.sampled_from([1, 4, 16])),
        padding_rows=draw(st.integers(0, 2)),
        padding_pages=draw(st.integers(0, 1)),
        top_k=9,
        threshold=draw(st.sampled_from([0, 0, 7, 12])),
        first_tokens=draw(st.integers(0, 4)),
        recent_tokens=draw(st.integers(1, 5)),
        hidden=draw(st.sampled_from([0, 0, 9])),
        largest=draw(st.sampled_from([0, 1, 5])),
    )
    assume(launch.launch.rows())
    return launch


def without_padding(lists: np.ndarray) -> list[list[list[int]]]:
    """Return every row's lists; assert that −1 fills the rest."""
    assert ((lists >= 0) | (lists == -1) | (lists == WHOLE)).all()
    rows = [[[s for s in mine if s != -1] for mine in row] for row in lists.tolist()]
    padded = [[[*mine, *[-1] * (lists.shape[2] - len(mine))] for mine in row] for row in rows]
    assert padded == lists.tolist()
    return rows


@settings(max_examples=25, deadline=None)
@given(launches(), st.integers(0, 2**32 - 1), st.booleans())
def test_the_indexer_equals_path_replay(launch: IndexerLaunch, seed: int, in_onnx: bool) -> None:
    arrays = launch.arrays(np.random.default_rng(seed))
    lists = (by_body if in_onnx else by_reference)(launch, arrays)
    assert without_padding(lists[: len(launch.launch.rows())]) == replayed(launch, arrays)


def permitted(launch: IndexerLaunch, arrays: Arrays, row: int, listed: list[int]) -> bool:
    """Return whether a list could be the row's under other scores."""
    positions, budget = arrays[8:]
    assert positions is not None and budget is not None
    sequence, branch, slot, lineage = launch.launch.rows()[row]
    if budget[sequence] < 0 or positions[row] < launch.threshold:
        return listed == [WHOLE, *[-1] * (len(listed) - 1)]
    path = list(range(min(slot + 1, branch.tree_start)))
    path += [branch.tree_start + node for node in lineage]
    always_listed = {s for s in path if s < launch.first_tokens or s >= branch.tree_start}
    always_listed |= set(path[-launch.recent_tokens :])
    count = min(len(path), len(always_listed) + budget[sequence])
    slots = listed[:count]
    rising = all(one < other for one, other in pairwise(slots))
    padding = [-1] * (len(listed) - count)
    return rising and always_listed <= set(slots) <= set(path) and listed[count:] == padding


@examples(15)
@given(launches(), st.integers(0, 2**32 - 1), st.data())
def test_the_check_detects_every_invalid_list(
    launch: IndexerLaunch, seed: int, data: st.DataObject
) -> None:
    """Change one entry of a list: only that row's sequence then attends to all tokens.

    A change may also give another valid list, by replacing one selected slot with another.
    """
    arrays = launch.arrays(np.random.default_rng(seed))
    lists = by_reference(launch, arrays)
    rows = launch.launch.rows()
    row = data.draw(st.integers(0, len(rows) - 1))
    entry = data.draw(st.integers(0, lists.shape[2] - 1))
    view = data.draw(st.integers(0, lists.shape[1] - 1))
    broken = lists.copy()
    broken[row, view, entry] = data.draw(st.integers(-3, 60))
    sequence = rows[row][0]
    is_valid = permitted(launch, arrays, row, broken[row, view].tolist())
    attributes = {**launch.attributes}
    del attributes["top_k"]
    checked, violations = portable(CHECK, finite((broken, *arrays[4:])), attributes)
    corrupted = np.zeros(len(launch.budgets), np.int32)
    corrupted[sequence] = not is_valid
    np.testing.assert_array_equal(violations, corrupted)
    for other, (owner, *_) in enumerate(rows):
        mark = np.array([WHOLE, *[-1] * (lists.shape[2] - 1)])
        expected = np.broadcast_to(mark, lists.shape[1:]) if corrupted[owner] else broken[other]
        np.testing.assert_array_equal(checked[other], expected)


@pytest.mark.parametrize("weighted", [True, False])
def test_scores_are_the_sum_over_heads(weighted: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 5, 3, 8, generator=generator, requires_grad=True)
    k = torch.randn(2, 7, 8, generator=generator)
    w = torch.randn(2, 5, 3, generator=generator) if weighted else None
    scores = indexer_scores(q, k, w)
    queries = q.detach()
    for a, t, s in [(0, 0, 0), (1, 4, 6), (0, 3, 2)]:
        by_hand = sum(
            (1.0 if w is None else float(w[a, t, h])) * max(0.0, float(queries[a, t, h] @ k[a, s]))
            for h in range(3)
        )
        assert float(scores.detach()[a, t, s]) == pytest.approx(by_hand, abs=1e-5)
    scores.sum().backward()
    assert q.grad is not None and q.grad.abs().sum() > 0


EXACT = {
    "decode": ([Branch(37, 1), Branch(5, 1)], False),
    "trees": (RAGGED, False),
    "one sequence": ([Branch(33, 2, BUSHY)], False),
    "a view per KV head": ([Branch(30, 0, chain_of(4)), Branch(11, 3)], True),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("mode", ["everything", "below the threshold"])
def test_unrestricted_rows_have_the_bits_of_full_attention(name: str, mode: str) -> None:
    """Use eight query heads a KV head; lists are either not applied or contain all tokens."""
    grown, per_head = EXACT[name]
    launch = Launch(grown, group=8, width=16, v_width=16, view_per_head=per_head)
    arrays = list(launch.arrays(np.random.default_rng(11)))
    index = indexer_launch(
        grown, *[64] * len(grown), views=2 if per_head else 1, top_k=64,
        threshold=0 if mode == "everything" else 1000,
    )  # fmt: skip
    lists = by_body(index, index.arrays(np.random.default_rng(12)))
    chosen = lists[: len(launch.rows()), :, 0] != WHOLE
    assert chosen.all() if mode == "everything" else not chosen.any()
    run = one_sequence if len(grown) == 1 else portable
    whole = run(ATTENTION, finite(tuple(arrays)), launch.attributes)[0]
    arrays[9] = lists
    sparse = run(ATTENTION, finite(tuple(arrays)), launch.attributes)[0]
    rows = len(launch.rows())
    np.testing.assert_array_equal(sparse[:rows], whole[:rows])


@settings(max_examples=8, deadline=None)
@given(st.lists(branches(), min_size=1, max_size=3), st.integers(0, 2**32 - 1), st.integers(0, 6))
def test_attention_over_lists_uses_the_listed_tokens_only(
    grown: list[Branch], seed: int, budget: int
) -> None:
    """Keys that no list contains may hold anything."""
    launch = Launch(grown, group=8, kv_heads=1, width=8, v_width=8, page_size=4)
    assume(launch.rows())
    index = indexer_launch(grown, *[budget] * len(grown))
    rng = np.random.default_rng(seed)
    lists = by_reference(index, index.arrays(rng))
    arrays = list(launch.arrays(rng))
    arrays[9] = lists
    sparse = portable(ATTENTION, finite(tuple(arrays)), launch.attributes)[0]
    q, k, v, table, *_ = arrays
    assert q is not None and k is not None and v is not None and table is not None
    sinks = arrays[8]
    assert sinks is not None
    for row, (sequence, *_) in enumerate(launch.rows()):
        slots = lists[row, 0][lists[row, 0] >= 0]
        pages = table[sequence, 0, slots // 4]
        keys, values = (pool[pages, 0, slots % 4].astype(np.float64) for pool in (k, v))
        logits = q[row] @ keys.T * 8**-0.5
        most = np.maximum(logits.max(1), sinks)
        weights = np.exp(logits - most[:, None])
        total = weights.sum(1) + np.exp(sinks - most)
        np.testing.assert_allclose(
            sparse[row], weights @ values / total[:, None], atol=2e-6, rtol=1e-5
        )


def test_a_draft_does_not_change_lists() -> None:
    """The recent tokens cover the draft: a row of a chain has the list that it has alone."""
    drawn = indexer_launch([Branch(40, 0, chain_of(4))], 6, recent_tokens=5, padding_rows=0)
    arrays = drawn.arrays(np.random.default_rng(4))
    verified = by_body(drawn, arrays)
    alone = replace(drawn, launch=replace(drawn.launch, branches=[Branch(40, 4)]))
    plain = list(arrays)
    plain[6], plain[7] = np.array([44], np.int32), np.zeros((4, 1), np.int32)
    np.testing.assert_array_equal(by_body(alone, tuple(plain)), verified)


def test_the_check_rejects_a_list_shorter_than_its_budget() -> None:
    """Delete one of the slots that scores selected, together with its list entry."""
    launch = indexer_launch([Branch(20, 1)], 6, padding_rows=0, top_k=6)
    arrays = launch.arrays(np.random.default_rng(3))
    lists = INDEXER.reference(
        *(None if a is None else torch.from_numpy(a) for a in arrays), **launch.attributes
    ).numpy()
    full = lists[:, :, : int((lists[0, 0] >= 0).sum())]
    short = np.delete(full, launch.first_tokens, axis=2)
    attributes = {**launch.attributes}
    del attributes["top_k"]
    _, none = portable(CHECK, (full, *arrays[4:]), attributes)
    checked, violations = portable(CHECK, (short, *arrays[4:]), attributes)
    assert (none.tolist(), violations.tolist()) == ([0], [short.shape[1]])
    assert (checked[0, :, 0] == WHOLE).all()
