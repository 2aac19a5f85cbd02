"""EAGLE3's trees against a brute-force draft without caches, and lazy extension."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from left_out import examples
from toy_engine import run, toy_engine
from toy_model import D2T, DRAFT_VOCAB, VOCAB, ToyExecutor, draft_step, toy_manifest

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.row_placement import SlotCounter
from specbuild.runtime.draft import eagle3 as drafting
from specbuild.runtime.draft.drafter import DrafterParts
from specbuild.runtime.draft.eagle3 import Eagle3Drafter
from specbuild.runtime.draft.policy import StepContext
from specbuild.runtime.draft.static_tree import StaticTree
from specbuild.runtime.draft.tree import DraftTrees, chain_trees, pack_bits, shallower
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.request import GenerateParams, Request, SequenceState
from specbuild.runtime.statistics import RunCounters

Node = tuple[int, ...]


def brute_tree(ids: list[int], aux_hidden: np.ndarray, shape: DraftShape) -> dict[Node, int]:
    """Return the depth of each selected node's path; each path is computed from the definition."""
    entries: list[int] = []
    for t in range(len(ids) - 1):
        own, root_out, root_logits = draft_step(entries, ids[t + 1], aux_hidden[t], t)
        entries.append(own)

    def expand(path: Node) -> tuple[np.ndarray, np.ndarray, list[int]]:
        seen, out, logits = list(entries), root_out, root_logits
        for depth, token in enumerate(path, start=1):
            own, out, logits = draft_step(seen, token, out, len(ids) - 2 + depth)
            seen.append(own)
        return logits, out, seen

    def children(path: Node, score: float) -> list[tuple[float, Node]]:
        logits = expand(path)[0].astype(np.float64)
        log_p = logits - math.log(np.exp(logits).sum())
        best = sorted(range(DRAFT_VOCAB), key=lambda i: (-logits[i], i))[: shape.draft_top_k]
        return [(score + log_p[i], (*path, int(i + D2T[i]))) for i in best]

    level = children((), 0.0)
    pool = list(level)
    for _ in range(shape.draft_depth - 1):
        frontier = sorted(level, key=lambda n: -n[0])[: shape.draft_top_k]
        level = [child for score, path in frontier for child in children(path, score)]
        pool += level
    kept = sorted(pool, key=lambda n: -n[0])[: shape.draft_tokens]
    return {path: len(path) for _, path in kept}


def paths_of(trees: DraftTrees, b: int) -> dict[Node, int]:
    """Return the tree's paths by its parents. Ancestor bits and depths must agree."""
    paths: list[Node] = [()]
    for i in range(1, int(trees.count[b])):
        parent = int(trees.parents[b, i])
        assert 0 <= parent < i
        paths.append((*paths[parent], int(trees.tokens[b, i])))
        ancestors, node = {i}, i
        while node:
            node = int(trees.parents[b, node])
            ancestors.add(node)
        bits = trees.ancestor_bits[b, i].view(np.uint32)
        assert {j for j in range(32 * len(bits)) if bits[j // 32] >> (j % 32) & 1} == ancestors
        assert trees.depths[b, i] == len(paths[-1])
    return {path: len(path) for path in paths[1:]}


def sequences_of(manifest: Manifest, batch: list[list[int]], kv: KvPools) -> list[SequenceState]:
    states = []
    for index, ids in enumerate(batch):
        wanted = kv.pages_needed(len(ids) + 4)
        states.append(
            SequenceState(
                request=Request("r", tuple(ids[:-1]), GenerateParams(), 4),
                index=index,
                ids=np.array([*ids, 0, 0, 0, 0], np.int32),
                pages=kv.admit(wanted),
                counters=RunCounters(0),
                text=None,
                num_tokens=len(ids),
                length=len(ids) - 1,
            )
        )
    return states


def drafted_trees(
    batch: list[list[int]], shape: DraftShape | StaticTree, seed: int
) -> tuple[list[SequenceState], list[np.ndarray], DraftTrees]:
    """Return sequences with these tokens, their random captured states, and the drafted trees."""
    manifest = toy_manifest()
    executor = ToyExecutor(manifest)
    kv = KvPools(manifest.cache_groups, manifest.limits, executor.poison)
    drafter = Eagle3Drafter(
        DrafterParts(executor, manifest, SlotCounter(200), manifest.drafters[0])
    )
    states = sequences_of(manifest, batch, kv)
    random = np.random.default_rng(seed)
    aux_hidden = [random.integers(0, 1000, (len(ids) - 1, 2)).astype(np.float32) for ids in batch]
    for state, rows in zip(states, aux_hidden, strict=True):
        for start in range(0, len(rows), 7):
            drafter.observe(state, rows[start : start + 7])
    trees = drafter.propose(states, shape)
    return states, aux_hidden, trees


@examples(60)
@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=20), min_size=1, max_size=3),
    st.sampled_from([DraftShape(1, 1, 1), DraftShape(1, 4, 4), DraftShape(1, 4, 2)])
    | st.sampled_from([DraftShape(2, 1, 2), DraftShape(3, 4, 12), DraftShape(3, 2, 5)])
    | st.just(DraftShape(2, 4, 9)),
    st.integers(0, 10**6),
)
def test_trees_equal_brute_force(batch: list[list[int]], shape: DraftShape, seed: int) -> None:
    states, aux_hidden, trees = drafted_trees(batch, shape, seed)
    for b, (ids, rows) in enumerate(zip(batch, aux_hidden, strict=True)):
        if shape.draft_top_k == 1:
            depth = min(shape.draft_depth, shape.draft_tokens)
            chain = brute_tree(ids, rows, DraftShape(1, depth, depth))
            assert paths_of(trees, b) == chain
        else:
            assert paths_of(trees, b) == brute_tree(ids, rows, shape)
        assert trees.tokens[b, 0] == ids[-1]
        assert states[b].pages["draft"].length == len(ids) - 1


def test_steps_without_a_draft_ingest_pending_tokens_in_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = toy_engine(max_rows=8)
    manifest = engine.manifest
    executor = engine.executor
    kv = KvPools(manifest.cache_groups, manifest.limits)
    drafter = Eagle3Drafter(
        DrafterParts(executor, manifest, SlotCounter(200), manifest.drafters[0])
    )
    (state,) = sequences_of(manifest, [list(range(20))], kv)
    rows = np.arange(38, dtype=np.float32).reshape(19, 2)
    monkeypatch.setattr(drafting, "PENDING_BYTES", 16 * rows[0].nbytes)
    for i in range(16):
        drafter.observe(state, rows[i : i + 1])
    assert executor.launches == []
    for i in range(16, 19):
        drafter.observe(state, rows[i : i + 1])
    assert [entry for entry in executor.launches if entry[0] == "draft"] == [("draft", 8)] * 2
    expected = brute_tree(list(range(20)), rows, DraftShape(1, 2, 2))
    assert paths_of(drafter.propose([state], DraftShape(1, 2, 2)), 0) == expected


def test_shapes_may_differ_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    params = GenerateParams(max_new_tokens=40, ignore_eos=True)
    plain = run(toy_engine(), [[1, 2], [3]], params, speculation=None)

    class Varying:
        max_depth, reason = 4, "a test"
        step = 0

        def shape(self, _outlook: StepContext) -> DraftShape | None:
            self.step += 1
            shapes = (None, DraftShape(1, 3, 3), None, None, DraftShape(3, 4, 12))
            return shapes[self.step % 5]

        def observe(self, *_: object) -> None:
            pass

    engine = toy_engine()
    monkeypatch.setattr(engine.decoder, "_default_policy", lambda _, **__: Varying())
    assert run(engine, [[1, 2], [3]], params).ids == plain.ids


@given(st.integers(1, 100), st.integers(1, 3), st.data())
@settings(deadline=None)
def test_bits_pack_as_the_contract_says(columns: int, rows: int, data: st.DataObject) -> None:
    bits = np.array(
        [
            data.draw(st.lists(st.booleans(), min_size=columns, max_size=columns))
            for _ in range(rows)
        ]
    )
    words = pack_bits(bits)
    assert words.dtype == np.int32
    assert words.shape == (rows, -(-columns // 32))
    for r in range(rows):
        for j in range(columns):
            assert (int(words[r, j // 32]) >> (j % 32)) & 1 == bits[r, j]


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
def test_a_truncated_tree_has_the_nodes_above(bound: int) -> None:
    trees = chain_trees([7, 8], np.arange(6, dtype=np.int32).reshape(2, 3))
    cut = trees.cut([bound, 3])
    assert cut.count.tolist() == [min(bound, 3) + 1, 4]
    for b, depth in enumerate((bound, 3)):
        kept = {p: d for p, d in paths_of(trees, b).items() if d <= depth}
        assert paths_of(cut, b) == kept
        assert (cut.tokens[b, cut.count[b] :] == -1).all()
    assert trees.cut([bound, 0]).tokens.shape[1] == min(bound, 3) + 1


def test_a_shallower_tree_has_no_more_nodes_than_it_drafts() -> None:
    assert shallower(DraftShape(3, 4, 12), 1) == DraftShape(3, 1, 3)
    assert shallower(DraftShape(3, 4, 12), 2) == DraftShape(3, 2, 12)
