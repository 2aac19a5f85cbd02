"""KvBlockSummary and KvBlockSelect against loops over single keys, blocks and queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from forms import portable
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.registry import op_named

SUMMARY, SELECT = op_named("KvBlockSummary"), op_named("KvBlockSelect")
Run = Callable[[OpSpec, Sequence[np.ndarray], dict[str, Any]], np.ndarray]
HIDDEN_KEY = np.float32(1e30)


def by_reference(
    op: OpSpec, arrays: Sequence[np.ndarray], attributes: dict[str, Any]
) -> np.ndarray:
    tensors = map(torch.from_numpy, arrays)
    result: np.ndarray = op.reference(*tensors, **op.complete(attributes)).numpy()
    return result


def by_body(op: OpSpec, arrays: Sequence[np.ndarray], attributes: dict[str, Any]) -> np.ndarray:
    return portable(op, arrays, attributes)[0]


each_form = pytest.mark.parametrize("run", [by_reference, by_body])


@dataclass(frozen=True)
class World:
    """Sequences of given lengths in scattered pages; ``sink`` and ``block`` are in pages."""

    lengths: tuple[int, ...]
    sink: int
    block: int
    page_size: int
    kv_heads: int
    group: int
    width: int = 8

    def whole_blocks(self, length: int) -> int:
        return max(0, length // self.page_size - self.sink) // self.block

    def table(self, rng: np.random.Generator) -> np.ndarray:
        num_pages = [-(-length // self.page_size) for length in self.lengths]
        pages = 1 + rng.permutation(sum(num_pages)).astype(np.int32)
        table = np.zeros((len(num_pages), max(num_pages)), np.int32)
        for row, count in zip(table, num_pages, strict=True):
            row[:count], pages = pages[:count], pages[count:]
        return table

    def keys(self, rng: np.random.Generator, table: np.ndarray) -> np.ndarray:
        """Return the keys of every page; those after the end of a sequence must not be used."""
        shape = (int(table.max()) + 1, self.kv_heads, self.page_size, self.width)
        pool = rng.standard_normal(shape).astype(np.float32)
        pool[0] = HIDDEN_KEY
        for row, length in zip(table, self.lengths, strict=True):
            if length % self.page_size:
                pool[row[length // self.page_size], :, length % self.page_size :] = HIDDEN_KEY
        return pool

    def keys_of_block(self, pool: np.ndarray, row: np.ndarray, block: int) -> np.ndarray:
        """Return the keys [block · page_size, kv_heads, width] of a block by position."""
        start = (self.sink + block * self.block) * self.page_size
        positions = range(start, start + self.block * self.page_size)
        size = self.page_size
        return np.stack([pool[row[p // size], :, p % size] for p in positions])

    @property
    def pages(self) -> dict[str, Any]:
        return {"sink_pages": self.sink, "block_pages": self.block}


@st.composite
def worlds(draw: st.DrawFn) -> World:
    return World(
        lengths=tuple(draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))),
        sink=draw(st.integers(0, 3)),
        block=draw(st.integers(1, 3)),
        page_size=draw(st.sampled_from([1, 2, 4])),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 3, 8])),
    )


@each_form
@settings(max_examples=15, deadline=None)
@given(world=worlds(), data=st.data())
def test_summaries_are_the_minima_and_maxima_of_full_blocks(
    run: Run, world: World, data: st.DataObject
) -> None:
    """Summarize in two calls, as a sequence grows: the last incomplete block is left for later."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    table = world.table(rng)
    pool = world.keys(rng, table)
    before = rng.standard_normal((len(pool), world.kv_heads, 2, world.width)).astype(np.float32)
    ends = [world.whole_blocks(length) for length in world.lengths]
    halves = [data.draw(st.integers(0, end)) for end in ends]
    zero = np.zeros(len(ends), np.int32)
    bounds = [zero, np.array(halves, np.int32), np.array(ends, np.int32)]
    result = before
    for first, end in pairwise(bounds):
        result = run(SUMMARY, [result, pool, table, first, end], world.pages)
    expected = before.copy()
    for row, end in zip(table, ends, strict=True):
        for block in range(end):
            keys = world.keys_of_block(pool, row, block)
            assert keys.max() < HIDDEN_KEY
            entry = expected[row[world.sink + block * world.block]]
            entry[:, 0], entry[:, 1] = keys.max(axis=0), keys.min(axis=0)
    np.testing.assert_array_equal(result[1:], expected[1:])


def score_of(queries: np.ndarray, keys: np.ndarray, reduction: str, score: str) -> float:
    """Return a block's score for a KV head:

    ``queries`` [n, group, D], ``keys`` [tokens, D], in fp64.
    """
    high, low = keys.max(axis=0), keys.min(axis=0)
    heads = []
    for g in range(queries.shape[1]):
        scores = []
        for x in queries[:, g]:
            if score == "dot":
                scores.append(max(float(x @ high), float(x @ low)))
            else:
                scores.append(sum(max(a * p, a * m) for a, p, m in zip(x, high, low, strict=True)))
        heads.append({"mean": np.mean(scores), "max": max(scores), "last": scores[0]}[reduction])
    return float(np.mean(heads))


def summarised(world: World, pool: np.ndarray, table: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    empty = np.full((len(pool), world.kv_heads, 2, world.width), HIDDEN_KEY, np.float32)
    first = np.zeros(len(blocks), np.int32)
    return by_reference(SUMMARY, [empty, pool, table, first, blocks], world.pages)


@each_form
@pytest.mark.parametrize("reduction", ["mean", "max", "last"])
@pytest.mark.parametrize("score", ["dot", "quest"])
@settings(max_examples=5, deadline=None)
@given(world=worlds(), data=st.data())
def test_the_view_has_the_best_blocks(
    run: Run, score: str, reduction: str, world: World, data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    table = world.table(rng)
    pool = world.keys(rng, table).astype(np.float64).astype(np.float32)
    whole = [world.whole_blocks(length) for length in world.lengths]
    # A window of up to two blocks has no summary yet; some sequences are inactive.
    blocks = np.array([data.draw(st.sampled_from([-1, max(0, n - 2), n])) for n in whole], np.int32)
    budget = np.array([data.draw(st.integers(1, 6)) for _ in whole], np.int32)
    chain = [data.draw(st.integers(0, 2)) for _ in whole]
    tree = [data.draw(st.integers(1, 4)) for _ in whole]
    rows = [c + t for c, t in zip(chain, tree, strict=True)]
    q = rng.standard_normal((sum(rows), world.kv_heads * world.group, world.width))
    q = q.astype(np.float32)
    starts = np.cumsum([0, *rows])
    tree_start = np.array(world.lengths, np.int32)
    row_slot = np.concatenate(
        [length - c + np.arange(n) for length, c, n in zip(world.lengths, chain, rows, strict=True)]
    )
    entries = world.sink + 6 * world.block + data.draw(st.integers(0, 9))
    old = rng.integers(500, 600, (len(rows), world.kv_heads, entries)).astype(np.int32)
    summaries = summarised(world, pool, table, blocks)
    arrays = [
        q, summaries, table, starts.astype(np.int32), row_slot.astype(np.int32), tree_start,
        np.array(tree, np.int32), blocks, budget, old,
    ]  # fmt: skip
    result = run(SELECT, arrays, {**world.pages, "reduction": reduction, "score": score})
    for b, count in enumerate(blocks):
        if count < 0:
            np.testing.assert_array_equal(result[b], old[b])
            continue
        asking = q[starts[b] + chain[b] : starts[b + 1]].astype(np.float64)
        for head in range(world.kv_heads):
            queries = asking.reshape(len(asking), world.kv_heads, world.group, -1)[:, head]
            scores = np.array(
                [
                    score_of(
                        queries,
                        world.keys_of_block(pool, table[b], block)[:, head].astype(np.float64),
                        reduction,
                        score,
                    )
                    for block in range(count)
                ]
            )
            assert_view(world, result[b, head], table[b], scores, int(budget[b]))


def assert_view(
    world: World, view: np.ndarray, row: np.ndarray, scores: np.ndarray, budget: int
) -> None:
    """Assert the view: sink, the best blocks that the budget allows, then the tail."""
    place = {int(page): i for i, page in enumerate(row) if page}
    used = [place[int(page)] for page in view if page]
    count, num_blocks = len(scores), min(budget, len(scores))
    assert used == sorted(set(used))
    sink = min(world.sink, len(place))
    assert used[:sink] == list(range(sink))
    middle = used[sink : sink + num_blocks * world.block]
    chosen = [(page - world.sink) // world.block for page in middle[:: world.block]]
    expected = [world.sink + world.block * c + i for c in chosen for i in range(world.block)]
    assert middle == expected
    assert len(chosen) == num_blocks
    left = [score for block, score in enumerate(scores) if block not in chosen]
    if left and chosen:
        assert min(scores[chosen]) >= max(left) - 1e-5
    # Every page after the last full block is in the view.
    behind = list(range(world.sink + world.block * count, len(place)))
    capacity = len(view) - world.sink - num_blocks * world.block
    if len(place) > world.sink:
        assert used[sink + num_blocks * world.block :] == behind[:capacity]


@each_form
def test_the_view_of_a_short_context_is_the_context(run: Run) -> None:
    world = World(lengths=(1,), sink=2, block=1, page_size=1, kv_heads=1, group=1, width=8)
    rng = np.random.default_rng(0)
    table = np.array([[7]], np.int32)
    q = rng.standard_normal((1, 1, 8)).astype(np.float32)
    pool = world.keys(rng, table).astype(np.float32)
    none, ones = np.zeros(1, np.int32), np.ones(1, np.int32)
    summaries = summarised(world, pool, table, none)
    old = np.full((1, 1, 4), 500, np.int32)
    starts = np.array([0, 1], np.int32)
    arrays = [q, summaries, table, starts, ones, ones, ones, none, ones, old]
    result = run(SELECT, arrays, {**world.pages, "reduction": "max", "score": "dot"})
    np.testing.assert_array_equal(result[0, 0], [7, 0, 0, 0])


@pytest.mark.parametrize("score", ["dot", "quest"])
@pytest.mark.parametrize("reduction", ["mean", "max", "last"])
@pytest.mark.parametrize("needle", [0, 1, 77, 187])
@each_form
def test_selects_an_old_block_with_one_matching_key(
    run: Run, needle: int, reduction: str, score: str
) -> None:
    """One key of 3000 has the direction of the queries: only its block is selected, by its head."""
    world = World((3050,), sink=2, block=1, page_size=16, kv_heads=2, group=8, width=32)
    rng = np.random.default_rng(needle)
    table = world.table(rng)
    pool = world.keys(rng, table)
    direction = rng.standard_normal(32).astype(np.float32)
    page = table[0, world.sink + needle]
    pool[page, 1, 5] = 6 * direction
    blocks = np.array([world.whole_blocks(3050)], np.int32)
    rows = 4
    q = 0.3 * rng.standard_normal((rows, 16, 32)).astype(np.float32)
    q[:, 8:] += direction
    arrays = [
        q, summarised(world, pool, table, blocks), table, np.array([0, rows], np.int32),
        (3050 + np.arange(rows)).astype(np.int32), np.array([3050], np.int32),
        np.array([rows], np.int32), blocks, np.array([1], np.int32),
        np.zeros((1, 2, 40), np.int32),
    ]  # fmt: skip
    result = run(SELECT, arrays, {**world.pages, "reduction": reduction, "score": score})
    assert result[0, 1, world.sink] == page
