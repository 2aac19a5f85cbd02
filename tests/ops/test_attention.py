"""PagedTreeAttention against path replay: each row attends over its literal token path.

The replay uses no bits, position tables or masks. It walks the row's path token by token, reads
each key and value through the page table, and computes a dense softmax in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from forms import one_sequence, portable
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples

from specbuild.plugins_cuda.cases import Arrays
from specbuild.plugins_cuda.paged_tree_attention.body import WHOLE
from specbuild.plugins_cuda.paged_tree_attention.cases import BUSHY, Branch, Launch, chain_of
from specbuild.plugins_cuda.registry import op_named

OP = op_named("PagedTreeAttention")
Attend = Callable[[Launch, Arrays], np.ndarray]


def by_reference(launch: Launch, arrays: Arrays) -> np.ndarray:
    tensors = [None if a is None else torch.from_numpy(a) for a in arrays]
    result: np.ndarray = OP.reference(*tensors, **launch.attributes).numpy()
    return result[: len(launch.rows())]


def by_body(launch: Launch, arrays: Arrays) -> np.ndarray:
    run = one_sequence if len(launch.branches) == 1 else portable
    finite = [np.nan_to_num(a, nan=1e30) if a is not None else None for a in arrays]
    return run(OP, finite, launch.attributes)[0][: len(launch.rows())]


def by_padded_body(launch: Launch, arrays: Arrays) -> np.ndarray:
    finite = [np.nan_to_num(a, nan=1e30) if a is not None else None for a in arrays]
    return portable(OP, finite, launch.attributes)[0][: len(launch.rows())]


each_form = pytest.mark.parametrize("attend", [by_reference, by_body, by_padded_body])


def replayed(launch: Launch, arrays: Arrays) -> np.ndarray:
    q, k_pool, v_pool, table, _, _, _, _, sinks, selected = arrays
    assert q is not None and k_pool is not None and v_pool is not None and table is not None
    rows = []
    for row, (sequence, branch, slot, lineage) in enumerate(launch.rows()):
        path = list(range(min(slot + 1, branch.tree_start)))
        path += [branch.tree_start + node for node in lineage]
        if launch.window:
            path = path[-launch.window :]
        everything = path
        rows.append([])
        for head in range(q.shape[1]):
            kv_head = head // launch.group
            if selected is not None:
                named = selected[row, kv_head if launch.lists_per_head else 0].tolist()
                path = [p for p in everything if p in named or named[0] == WHOLE]
            view = table[sequence, kv_head if launch.view_per_head else 0]
            entries = [(view[p // launch.page_size], kv_head, p % launch.page_size) for p in path]
            query = q[row, head].astype(np.float64)
            scores = [query @ k_pool[entry] * launch.width**-0.5 for entry in entries]
            sink = [float(sinks[head])] if sinks is not None else []
            most = max(scores + sink)
            weights = [np.exp(score - most) for score in scores]
            total = sum(weights) + sum(np.exp(s - most) for s in sink)
            terms = [w / total * v_pool[e] for w, e in zip(weights, entries, strict=True)]
            rows[-1].append(sum(terms))
    return np.array(rows)


@st.composite
def branches(draw: st.DrawFn) -> Branch:
    nodes = draw(st.sampled_from([0, 0, 1, 3, 7, 12, 34]))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(nodes))
    context, chain = draw(st.integers(0, 20)), draw(st.integers(0, 6))
    some = draw(st.booleans()) and nodes > 2
    return Branch(context, chain, parents, tuple(range(nodes // 2, nodes)) if some else None)


@st.composite
def launches(draw: st.DrawFn) -> Launch:
    launch = Launch(
        draw(st.lists(branches(), min_size=1, max_size=3)),
        kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 3])),
        width=8,
        v_width=draw(st.sampled_from([8, 5])),
        page_size=draw(st.sampled_from([1, 4, 16])),
        window=draw(st.sampled_from([0, 0, 1, 2, 5, 40])),
        sinks=draw(st.booleans()),
        view_per_head=draw(st.booleans()),
        selected=draw(st.sampled_from([0, 0, 5])),
        lists_per_head=draw(st.booleans()),
        whole_rows=draw(st.sampled_from([None, 0, 1])),
        padding_rows=draw(st.integers(0, 2)),
        padding_pages=draw(st.integers(0, 1)),
    )
    if launch.rows():
        return launch
    return replace(launch, branches=[*launch.branches, Branch(3, 1)])


@examples(60)
@given(launches(), st.integers(0, 2**32 - 1))
def test_reference_equals_path_replay(launch: Launch, seed: int) -> None:
    arrays = launch.arrays(np.random.default_rng(seed))
    expected = replayed(launch, arrays)
    np.testing.assert_allclose(by_reference(launch, arrays), expected, atol=2e-6, rtol=1e-5)


@examples(40)
@given(launches(), st.integers(0, 2**32 - 1))
def test_body_equals_path_replay(launch: Launch, seed: int) -> None:
    arrays = launch.arrays(np.random.default_rng(seed))
    expected = replayed(launch, arrays)
    np.testing.assert_allclose(by_body(launch, arrays), expected, atol=2e-6, rtol=1e-5)


MANY_ROWS = Launch([Branch(9, 0, BUSHY), Branch(0, 6), Branch(4, 2, chain_of(3))])


@each_form
def test_softmax_of_every_row_includes_the_sink(attend: Attend) -> None:
    """Use keys of 0 and values of 1: n visible tokens and a sink s give n / (n + e^s)."""
    arrays = list(MANY_ROWS.arrays(np.random.default_rng(1)))
    for index, value in ((1, 0), (2, 1)):
        arrays[index] = np.where(np.isnan(arrays[index]), arrays[index], np.float32(value))
    sink = np.exp(arrays[8].astype(np.float64))
    for totals, (_, branch, slot, lineage) in zip(
        attend(MANY_ROWS, arrays), MANY_ROWS.rows(), strict=True
    ):
        seen = min(slot + 1, branch.tree_start) + len(lineage)
        expected = np.broadcast_to((seen / (seen + sink))[:, None], totals.shape)
        np.testing.assert_allclose(totals, expected, rtol=1e-5)


@each_form
def test_sinks_are_equal_in_prefill_and_decode(attend: Attend) -> None:
    whole = Launch([Branch(0, 12)], window=5)
    arrays = whole.arrays(np.random.default_rng(2))
    together = attend(whole, arrays)
    q, k, v, table, _, slot, _, bits, sinks, _ = arrays
    assert q is not None and slot is not None and bits is not None
    for row in range(12):
        step = replace(whole, branches=[Branch(row, 1)], padding_rows=0)
        one = [q[row : row + 1], k, v, table, np.array([0, 1], np.int32), slot[row : row + 1]]
        start = np.array([row + 1], np.int32)
        alone = attend(step, (*one, start, bits[row : row + 1], sinks, None))
        np.testing.assert_allclose(alone[0], together[row], atol=1e-6, rtol=1e-5)


@each_form
def test_window_ends_at_the_position_of_each_node(attend: Attend) -> None:
    """Values are slot numbers and scores are equal, so the result shows the visible slots."""
    branch = Branch(10, 0, (-1, 0, 0, 0, 1, 3))
    launch = Launch([branch], window=4, v_width=16, sinks=False, padding_rows=0, page_size=16)
    arrays = list(launch.arrays(np.random.default_rng(3)))
    arrays[1] = np.where(np.isnan(arrays[1]), arrays[1], np.float32(0))
    page = int(arrays[3][0, 0, 0])
    arrays[2][page] = np.eye(16, dtype=np.float32)
    seen = [set(np.flatnonzero(row[0] > 0.01).tolist()) for row in attend(launch, arrays)]
    assert seen == [
        {7, 8, 9, 10},
        {8, 9, 10, 11},
        {8, 9, 10, 12},
        {8, 9, 10, 13},
        {9, 10, 11, 14},
        {9, 10, 13, 15},
    ]


@each_form
@pytest.mark.parametrize("sink", [80.0, -80.0])
def test_running_maximum_includes_the_sink(attend: Attend, sink: float) -> None:
    """Use scores of 80 and −80: exp overflows unless the running maximum includes both sides."""
    launch = Launch([Branch(70, 0, BUSHY), Branch(0, 5)], window=4, page_size=16)
    arrays = list(launch.arrays(np.random.default_rng(4)))
    side = np.float32((80 / launch.attributes["scale"] / launch.width) ** 0.5)
    arrays[0] = np.where(np.isnan(arrays[0]), arrays[0], side)
    arrays[1] = np.where(np.isnan(arrays[1]), arrays[1], -side * np.float32(np.sign(sink)))
    arrays[8] = np.full_like(arrays[8], sink)
    result = attend(launch, arrays)
    np.testing.assert_allclose(result, replayed(launch, arrays), atol=1e-6, rtol=1e-4)
    assert (np.abs(result).max() < 1e-6) == (sink > 0)


@each_form
def test_a_sequence_does_not_attend_to_other_sequences(attend: Attend) -> None:
    together = Launch([Branch(9, 0, BUSHY), Branch(20, 3)], window=6)
    arrays = together.arrays(np.random.default_rng(5))
    before = attend(together, arrays)[: len(BUSHY)]
    table = arrays[3]
    assert table is not None
    changed = [None if a is None else a.copy() for a in arrays]
    for pool in (changed[1], changed[2]):
        pool[table[1, 0, table[1, 0] > 0]] *= 3
    np.testing.assert_array_equal(attend(together, changed)[: len(BUSHY)], before)
