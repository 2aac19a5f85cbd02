"""User-defined trees: their arrays, their tokens against a brute-force draft, and refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from left_out import examples
from test_drafting import drafted_trees, paths_of
from toy_engine import run, toy_engine
from toy_model import D2T, DRAFT_VOCAB, VOCAB, draft_step, toy_manifest

from specbuild.cli.options.draft_choice import read_tree
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.draft.static_tree import PlacedTree, StaticTree
from specbuild.runtime.draft.tree import check_shape
from specbuild.runtime.engine_dir.drafters.suffix import SuffixRecord
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError, SpecbuildError
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

Path_ = tuple[int, ...]


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    """Draw trees within the toy's limits: 3 children, 4 levels, 12 nodes, 9 inner nodes."""
    parents: list[int] = []
    depths: list[int] = []
    for node in range(draw(st.integers(1, 12))):
        free = [p for p in range(-1, node) if parents.count(p) < 3 and (p < 0 or depths[p] < 4)]
        inner = {p for p in parents if p >= 0}
        free = [p for p in free if p < 0 or p in inner or len(inner) < 9]
        if not free:
            break
        parents.append(draw(st.sampled_from(free)))
        depths.append(1 if parents[-1] < 0 else depths[parents[-1]] + 1)
    return parents


def ranked_paths(parents: Sequence[int]) -> list[Path_]:
    """Return for each node its index among its siblings, and those of its ancestors."""
    paths: list[Path_] = []
    for node, parent in enumerate(parents):
        rank = parents[:node].count(parent)
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return paths


def grown(tree: PlacedTree, seed: int) -> dict[Path_, int]:
    """Depth by token path of the tree that a device's ops keep, by their references.

    The logits of a node follow from its token path.
    """
    k, depth, vocab = tree.program.draft_top_k, tree.program.draft_depth, 40
    d2t, form = torch.zeros(vocab, dtype=torch.int32), torch.from_numpy(tree.form)
    frontier: list[Path_] = [()]
    pool: list[Path_] = []
    scores: list[torch.Tensor] = []
    parents: list[int] = []
    indices = [-1]
    for _ in range(depth):
        first = len(pool)
        logits = torch.stack([logits_of_path(path, seed) for path in frontier])
        tokens, child, best = op_named("TreeExpand").reference(
            logits, torch.full((1, len(frontier)), -0.1), d2t, torch.tensor(k),
            form=form[first : first + len(frontier) * k],
        )  # fmt: skip
        for i, token in enumerate(tokens[0].tolist()):
            pool.append((*frontier[i // k], token))
            parents.append(indices[i // k])
        scores.append(child[0])
        indices = [first + i for i in best[0].tolist()]
        frontier = [pool[i] for i in indices]
    assert len(pool) == tree.program.candidates == len(form)
    kept = op_named("TreeSelect").reference(
        torch.arange(len(pool)).int()[None], torch.cat(scores)[None],
        torch.tensor(parents).int()[None], torch.tensor(tree.program.draft_tokens), depth=depth,
    )  # fmt: skip
    return {pool[i]: d for i, d in zip(kept[0][0, 1:], kept[2][0, 1:], strict=True) if i >= 0}


def logits_of_path(path: Path_, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((seed, *path)) % 2**31)
    return torch.randn(40, generator=generator)


@given(parent_lists(), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_devices_ops_grow_a_tree_of_fixed_form(parents: list[int], seed: int) -> None:
    """In programs of larger trees: every node has the token of its rank, and there are no more."""
    tree = StaticTree.of(parents)
    expected: dict[Path_, Path_] = {}
    for ranks in sorted(ranked_paths(parents), key=len):
        above = expected.get(ranks[:-1], ())
        best = logits_of_path(above, seed).sort(descending=True, stable=True).indices
        expected[ranks] = (*above, int(best[ranks[-1]]))
    wide = max(Counter(tree.depths[tree.inner].tolist()).values(), default=1)
    top_k = max(tree.draft_top_k, wide)
    for larger in (0, 1):
        program = DraftShape(top_k + larger, tree.draft_depth + larger, len(parents) + 2 * larger)
        placed = tree.placed(program)
        assert placed is not None
        assert grown(placed, seed) == {path: len(path) for path in expected.values()}
    assert tree.placed(DraftShape(top_k, tree.draft_depth, len(parents) - 1)) is None
    if top_k > 1:
        assert tree.placed(DraftShape(top_k - 1, tree.draft_depth, len(parents))) is None


@given(parent_lists())
@settings(max_examples=200, deadline=None)
def test_slots_are_ordered_by_depth_and_keep_parents(parents: list[int]) -> None:
    tree = StaticTree.of(parents)
    assert tree.draft_tokens == tree.candidates == len(parents)
    assert list(tree.depths) == sorted(tree.depths) and tree.draft_depth == tree.depths[-1]
    own = ranked_paths([p - 1 for p in tree.parents])
    assert sorted(own) == sorted(ranked_paths(parents))
    assert [path[-1] for path in own] == tree.ranks.tolist()
    assert max(tree.ranks) + 1 == tree.draft_top_k
    check_shape(tree, toy_manifest().limits)
    tokens = np.arange(len(parents), dtype=np.int32)[None] + 10
    paths_of(tree.trees([1], tokens), 0)  # parents, depths and ancestor bits agree
    for depth in range(1, tree.draft_depth + 1):
        cut = tree.shallower(depth)
        kept = [path for path in own if len(path) <= depth]
        assert ranked_paths([p - 1 for p in cut.parents]) == kept


def brute_paths(ids: list[int], aux_hidden: np.ndarray, tree: StaticTree) -> list[Path_]:
    """Return the tokens along each node's path, computed from the definition."""
    entries: list[int] = []
    for t in range(len(ids) - 1):
        own, out, logits = draft_step(entries, ids[t + 1], aux_hidden[t], t)
        entries.append(own)
    found = []
    for ranks in ranked_paths([p - 1 for p in tree.parents]):
        seen, features, scores, path = list(entries), out, logits, ()
        for depth, rank in enumerate(ranks, start=1):
            best = sorted(range(DRAFT_VOCAB), key=lambda i, s=scores: (-s[i], i))[rank]
            path = (*path, int(best + D2T[best]))
            own, features, scores = draft_step(seen, path[-1], features, len(ids) - 2 + depth)
            seen.append(own)
        found.append(path)
    return found


@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=12), min_size=1, max_size=3),
    parent_lists(),
    st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_tokens_of_static_trees_equal_brute_force(
    batch: list[list[int]], parents: list[int], seed: int
) -> None:
    tree = StaticTree.of(parents)
    states, aux_hidden, trees = drafted_trees(batch, tree, seed)
    for b, (ids, rows) in enumerate(zip(batch, aux_hidden, strict=True)):
        assert list(paths_of(trees, b)) == brute_paths(ids, rows, tree)
        assert states[b].pages["draft"].length == len(ids) - 1


@given(parent_lists())
@settings(max_examples=50, deadline=None)
def test_nodes_of_a_one_pass_draft_have_the_tokens_of_their_level(parents: list[int]) -> None:
    tree = StaticTree.of(parents)
    tokens = np.arange(2 * 4 * 3, dtype=np.int32).reshape(2, 4, 3)
    trees = tree.of_positions([50, 51], tokens[:, : tree.draft_depth, : tree.draft_top_k])
    for b in range(2):
        wanted = [
            tuple(int(tokens[b, depth, rank]) for depth, rank in enumerate(ranks))
            for ranks in ranked_paths([p - 1 for p in tree.parents])
        ]
        assert list(paths_of(trees, b)) == wanted and trees.tokens[b, 0] == 50 + b


@given(parent_lists(), st.sampled_from([0.0, 0.8]))
@examples(25)
def test_static_trees_change_no_token(parents: list[int], temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=4)
    params, prompts = GenerateParams(max_new_tokens=14, sampling=sampling), [[1, 2, 3], [7]]
    plain = run(toy_engine(), prompts, params, speculation=None)
    assert run(toy_engine(), prompts, params, speculation=StaticTree.of(parents)).ids == plain.ids


@pytest.mark.parametrize(
    ("parents", "words"),
    [
        ([], "has 0 nodes; give the parents of 1 to"),
        ([0], "node 0 of the draft tree has parent 0; give -1 for the root"),
        ([-1, -2], "node 1 of the draft tree has parent -2"),
        ([-1, 2, 0], "node 1 of the draft tree has parent 2"),
    ],
)
def test_rejects_invalid_trees(parents: list[int], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        StaticTree.of(parents)


@pytest.mark.parametrize(
    ("parents", "words"),
    [
        ([-1] * 4, "draft_top_k is 4, but the engine was built for at most 3"),
        ([-1, 0, 1, 2, 3], "draft_depth is 5, but the engine was built for at most 4"),
        ([-1, -1, -1, *[0] * 3, *[1] * 3, *[2] * 3, 3], "draft_tokens is 13"),
    ],
)
def test_rejects_trees_beyond_the_limits(parents: list[int], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        run(toy_engine(), [[1]], GenerateParams(), speculation=StaticTree.of(parents))


def test_the_number_of_inner_nodes_is_limited() -> None:
    """Three children and two levels permit three nodes with children."""
    limits = DraftShape(3, 2, 12)
    wide = StaticTree.of([-1, -1, -1, 0, 1, 2])
    run(toy_engine(limits=limits), [[1]], GenerateParams(max_new_tokens=4), speculation=wide)
    deep = StaticTree.of([-1, -1, 0, 0, 1, 1])
    run(toy_engine(limits=limits), [[1]], GenerateParams(max_new_tokens=4), speculation=deep)
    narrow = DraftShape(2, 4, 12)
    five = StaticTree.of([-1, -1, 0, 0, 1, 2, 3, 4])
    run(toy_engine(limits=narrow), [[1]], GenerateParams(max_new_tokens=4), speculation=five)
    many = StaticTree.of([-1, -1, 0, 0, 1, 1, 2, 3, 4, 5])
    assert len(many.inner) == 6
    run(toy_engine(limits=narrow), [[1]], GenerateParams(max_new_tokens=4), speculation=many)
    more = StaticTree.of([-1, -1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6])
    with pytest.raises(RequestError, match="7 nodes with children, the engine's draft supports 6"):
        run(toy_engine(limits=narrow), [[1]], GenerateParams(), speculation=more)


def test_suffix_decoding_accepts_chains_only() -> None:
    engine = toy_engine(suffix=SuffixRecord(max_tokens=4))
    with pytest.raises(RequestError, match="proposes only chains"):
        run(engine, [[1]], GenerateParams(), drafter="suffix", speculation=StaticTree.of([-1, -1]))


@pytest.mark.parametrize("text", ["[-1, -1, 0]", '{"parents": [-1, -1, 0]}'])
def test_a_tree_file_has_the_parents(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tree.json"
    file.write_text(text)
    assert read_tree(file) == StaticTree(2, 2, 3, (0, 0, 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[-1,", "is no JSON"),
        ("{}", "give a list of parents"),
        ('{"parents": [-1], "more": 1}', "give a list of parents"),
        ("[-1, 0.5]", "give a list of parents"),
        ("[-1, true]", "give a list of parents"),
        ("[-1, 7]", "node 1 of the draft tree has parent 7"),
        (None, "cannot be read"),
    ],
)
def test_reports_an_invalid_file_in_one_line(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "tree.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SpecbuildError, match=words) as caught:
        read_tree(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
