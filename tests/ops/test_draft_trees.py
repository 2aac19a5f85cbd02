"""TreeExpand, TreeSelect and TreeAccept against a dynamic tree of plain lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from specbuild.plugins_cuda.tree_accept.cases import accept
from specbuild.plugins_cuda.tree_select.cases import select
from specbuild.runtime.draft.one_pass import candidate_pool

EXPAND, SELECT, ACCEPT = op_named("TreeExpand"), op_named("TreeSelect"), op_named("TreeAccept")
# Temperature, seed and position.
WITHOUT_NOISE = (None, None, None)
Run = Callable[[OpSpec, Sequence[Any], Mapping[str, Any]], list[np.ndarray]]
seeds = st.integers(0, 2**32 - 1)


def by_reference(
    op: OpSpec, arrays: Sequence[Any], attributes: Mapping[str, Any]
) -> list[np.ndarray]:
    tensors = (None if a is None else torch.from_numpy(a) for a in arrays)
    outputs = op.reference(*tensors, **attributes)
    return [output.numpy() for output in outputs]


each_form = pytest.mark.parametrize("run", [by_reference, portable])


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_level_pool_equals_the_pool_of_the_host(
    seed: int, batch: int, top_k: int, depth: int, tied: bool
) -> None:
    """Compare the op of CUDA engines with the NumPy function that expands trees on the host."""
    rng = np.random.default_rng(seed)
    scores = -np.sort(rng.exponential(1.0, (batch, depth, top_k)).astype(np.float32), axis=-1)
    scores = np.round(scores) if tied else scores
    tokens = rng.integers(0, 50, (batch, depth, top_k)).astype(np.int32)
    flat = [array.reshape(batch, depth * top_k) for array in (tokens, scores)]
    level_pool = by_reference(op_named("LevelPool"), flat, {"depth": depth})
    expected = candidate_pool(tokens, scores)
    for result, name in zip(level_pool, ("tokens", "scores", "parents"), strict=True):
        np.testing.assert_array_equal(result, expected[name], err_msg=name)


def best_first(values: Sequence[float]) -> list[int]:
    """Return indices by falling value, then rising index."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def lineage(parents: Sequence[int], node: int) -> list[int]:
    """Return the path from the root to a node, both included."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


@each_form
@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(1, 3), st.integers(1, 4), st.booleans(), st.booleans())
def test_expand_ranks_children_and_frontier(
    run: Run, seed: int, batch: int, top_k: int, root: bool, tied: bool
) -> None:
    rng = np.random.default_rng(seed)
    frontier, vocab = 1 if root else top_k, 9
    logits = rng.standard_normal((batch * frontier, vocab)).astype(np.float32) * 2
    if tied:
        logits = np.round(logits)
    score = -np.abs(rng.standard_normal((batch, frontier))).astype(np.float32)
    d2t = rng.integers(0, 50, vocab).astype(np.int32)
    tokens, scores, best = run(
        EXPAND, [logits, score, d2t, np.array(top_k, np.int32), *WITHOUT_NOISE], {}
    )
    for b in range(batch):
        wanted_tokens, wanted_scores = [], []
        for f in range(frontier):
            row = logits[b * frontier + f].astype(float).tolist()
            total = math.log(sum(math.exp(x) for x in row))
            for child in best_first(row)[:top_k]:
                wanted_tokens.append(child + int(d2t[child]))
                wanted_scores.append(float(score[b, f]) + row[child] - total)
        assert tokens[b].tolist() == wanted_tokens
        np.testing.assert_allclose(scores[b], wanted_scores, atol=1e-5)
        assert best[b].tolist() == best_first(scores[b].tolist())[:top_k]


@each_form
def test_a_certain_child_does_not_outrank_its_parent(run: Run) -> None:
    logits = np.full((1, 40), -30, np.float32)
    logits[0, 7] = 30.0
    score = np.array([[-0.3]], np.float32)
    arrays = [logits, score, np.zeros(40, np.int32), np.array(1, np.int32), *WITHOUT_NOISE]
    assert run(EXPAND, arrays, {})[1][0, 0] <= score[0, 0]


def selected_by_hand(
    tokens: Sequence[int], scores: Sequence[float], parents: Sequence[int], max_nodes: int
) -> list[tuple[int, int, list[int]]]:
    """Return token, parent's slot and path of slots of every selected candidate.

    The root is slot 0.
    """
    selected = sorted(i for i in best_first(scores)[:max_nodes] if scores[i] != -math.inf)
    slot_of = {-1: 0} | {candidate: number for number, candidate in enumerate(selected, start=1)}
    result = []
    for candidate in selected:
        path = lineage(parents, candidate)
        result.append(
            (tokens[candidate], slot_of[parents[candidate]], [0, *map(slot_of.get, path)])
        )
    return result


def ancestors_of(words: np.ndarray) -> list[int]:
    bits = [(int(word) >> bit) & 1 for word in words for bit in range(32)]
    return [slot for slot, bit in enumerate(bits) if bit]


@each_form
@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(1, 4), st.integers(1, 5), st.booleans(), st.sampled_from([0.0, 0.3]))
def test_select_returns_the_best_candidates_as_a_tree(
    run: Run, seed: int, top_k: int, depth: int, tied: bool, absent: float
) -> None:
    rng = np.random.default_rng(seed)
    pool = top_k + (depth - 1) * top_k**2
    max_nodes = int(rng.integers(1, pool + 1))
    case = select(
        "drawn",
        top_k=top_k,
        depth=depth,
        draft_tokens=max_nodes,
        step=1.0 if tied else 0.0,
        absent=absent,
    )
    arrays = case.make(rng)
    tokens, parents, depths, bits, count = run(SELECT, arrays, case.attributes)
    for b in range(len(count)):
        hand = selected_by_hand(*(array[b].tolist() for array in arrays[:3]), max_nodes)
        used = len(hand) + 1
        assert count[b] == used
        assert tokens[b].tolist() == [-1, *(t for t, _, _ in hand)] + [-1] * (max_nodes + 1 - used)
        assert parents[b].tolist() == [-1, *(p for _, p, _ in hand)] + [-1] * (max_nodes + 1 - used)
        for slot, (_, _, path) in enumerate(hand, start=1):
            assert depths[b, slot] == len(path) - 1
            assert ancestors_of(bits[b, slot]) == path
        for slot in [0, *range(used, max_nodes + 1)]:
            assert depths[b, slot] == 0
            assert ancestors_of(bits[b, slot]) == [slot]


@each_form
@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(0, 40), st.integers(1, 6), st.booleans(), st.sampled_from([0.5, 1.0]))
def test_accept_is_the_longest_path_that_matches_the_choices(
    run: Run, seed: int, nodes: int, depth: int, chain: bool, follow: float
) -> None:
    rng = np.random.default_rng(seed)
    limit = nodes if chain and nodes else depth
    counts = [int(rng.integers(1, nodes + 2)) for _ in range(3)]
    case = accept("drawn", nodes=nodes, depth=limit, counts=counts, follow=follow, chain=chain)
    arrays = case.make(rng)
    tokens, parents, _, _, choice, _ = arrays
    assert tokens is not None and parents is not None and choice is not None
    path, accepted, next_token = run(ACCEPT, list(arrays), case.attributes)
    for b, used in enumerate(counts):
        spelled = []
        for node in range(used):
            walk = lineage(parents[b].tolist(), node)
            if all(choice[b, above] == tokens[b, below] for above, below in pairwise(walk)):
                spelled.append(walk)
        longest = max(spelled, key=len)
        assert accepted[b] == len(longest) - 1
        assert path[b].tolist() == longest + [-1] * (limit + 1 - len(longest))
        assert next_token[b] == choice[b, longest[-1]]
