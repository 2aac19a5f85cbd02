"""Attention by teams of warps with splits of their own, emulated: the bits of the plain kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_launches import Geometry, Launch, Text
from emulation import has_compiler
from launch_branches import Branch, alone, node, reverified, wide_node
from left_out import slow

from specbuild.builder.backends.cuda.tuning.kernel_case import bits
from specbuild.plugins_cuda.launches import Target
from specbuild.plugins_cuda.paged_tree_attention.op import OP

pytestmark = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")

SHAPE = Geometry(group=3, width=16, page_size=64)
REAL = Geometry(group=8, width=64, page_size=64, words=1)
PAGES = 72  # 32 splits of the context, or 16 where there are 8 KV heads
EMPTY: Branch[Text] = Branch(Text.drawn(1, SHAPE, 9), (), 0, ())


def attended(
    shape: Geometry,
    branches: list[Branch[Text]],
    teams: int,
    multiprocessors: int,
    padding: int = 2,
) -> list[np.ndarray]:
    """Of a launch whose grid fills a GPU of that size."""
    launch = Launch(
        shape, branches, padding_rows=padding, pages=PAGES, seed=3,
        tactic={"split_teams": teams}, target=Target(multiprocessors=multiprocessors),
    )  # fmt: skip
    assert launch.entries() == ["attend_split_per_warp"]
    return launch.attended()


def wanted(shape: Geometry, branch: Branch[Text]) -> np.ndarray:
    """By the plain kernel, alone."""
    launch = Launch(shape, [branch], pages=PAGES, tactic={"split_teams": 0})
    assert launch.entries() == ["attend_split"]
    return launch.attended()[0]


def assert_same(
    shape: Geometry, branches: list[Branch[Text]], teams: int, multiprocessors: int
) -> None:
    found = attended(shape, branches, teams, multiprocessors)
    for index, (rows, branch) in enumerate(zip(found, branches, strict=True)):
        if branch.rows:
            np.testing.assert_array_equal(rows, wanted(shape, branch), err_msg=str(index))


@pytest.mark.parametrize(
    ("teams", "multiprocessors"), [(2, 3), (8, 1), (8, 70), *slow((2, 1), (2, 70), (8, 3))]
)
def test_rows_of_any_context_get_the_bits_of_the_plain_kernel(
    teams: int, multiprocessors: int
) -> None:
    """One CTA for all sequences in turn, one for each, several for the long one."""
    text, other = Text.drawn(2600, SHAPE, 1), Text.drawn(300, SHAPE, 2)
    singles = [alone(text, 2500), alone(other, 0), EMPTY, alone(other, 127), alone(text, 1100)]
    assert_same(SHAPE, singles, teams, multiprocessors)
    assert_same(
        SHAPE, [reverified(text, 1500, 2), reverified(other, 129, 2)], teams, multiprocessors
    )
    chains = [
        reverified(other, 200, 4),
        reverified(text, 2590, 4),
        alone(other, 5),
        reverified(text, 130, 3),
    ]
    assert_same(SHAPE, chains, teams, multiprocessors)


@pytest.mark.parametrize("multiprocessors", [40, *slow(2)])
def test_trees_get_the_bits_of_the_plain_kernel(multiprocessors: int) -> None:
    """Tiles that are a row's own, in the tree's copy or gathered; more rows than a CTA takes."""
    text, other = Text.drawn(1300, SHAPE, 1), Text.drawn(300, SHAPE, 2)
    for position in (2, 66, 127, 129, 1200):
        tree = node(text, position, (164, 163, 0, 162))
        branches = [node(other, 40, (3, 4, 5, 6)), tree, alone(other, 250)]
        assert_same(SHAPE, branches, 8, multiprocessors)
    assert_same(SHAPE, [wide_node(text, 257), reverified(other, 290, 19)], 8, multiprocessors)
    # A row alone with ancestors in the tree: drafting behind scattered slots.
    lone = node(text, 700, (1, 2, 3, 4))
    row = Branch(text, lone.tokens, lone.tree_start, lone.rows[5:6], lone.lineages[5:6])
    assert_same(SHAPE, [row, row], 8, multiprocessors)


@pytest.mark.parametrize(
    ("shape", "rows", "teams"),
    [
        (REAL, 1, 8),
        (replace(REAL, group=4, width=128), 7, 2),
        *slow(*((REAL, rows, 8) for rows in (3, 4, 5, 8))),
        *slow(*((replace(REAL, group=4, width=128), rows, 4) for rows in (1, 2, 3))),
        *slow(
            (replace(REAL, group=4, width=128), 4, 2),
            (replace(REAL, width=128), 2, 2),
            (replace(REAL, group=4), 7, 8),
        ),
    ],
)
def test_heads_of_64_and_128(shape: Geometry, rows: int, teams: int) -> None:
    text = Text.drawn(1500, shape, 4)
    branches = [reverified(text, position, rows) for position in (1400, 300, 95)]
    for multiprocessors in (2, 30):
        assert_same(shape, branches, teams, multiprocessors)


def cancelling(shape: Geometry, position: int, seed: int) -> Text:
    """Values that cancel over the keys up to ``position``: their rounding is all that is left.

    So another order of fp32 sums has other bits in bf16, too.
    """
    text, rng = Text.drawn(position + 1, shape, seed), np.random.default_rng(seed)
    values = rng.normal(size=text.v.shape) * 2.0 ** rng.integers(-12, 13, text.v.shape)
    order = rng.permutation(position + 1)
    half = len(order) // 2
    values[order[half : 2 * half]] = -values[order[:half]]
    return Text(text.q, np.zeros_like(text.k), bits(torch.from_numpy(values).bfloat16()))


LEFT_OVER = [128 * slots - 1 - 13 * slots for slots in (9, 10, 11, 12, 13, 14, 15)]


@pytest.mark.parametrize(("teams", "multiprocessors"), [(8, 7), *slow((4, 1), (4, 7), (8, 1))])
def test_splits_that_are_left_over_are_shared_by_tile_runs(
    teams: int, multiprocessors: int
) -> None:
    """Behind whole rounds one to seven splits, with and without a tree; of one CTA and of several.

    Five rows and more are two warps' of a team, of which a CTA then has four.
    """
    texts = [cancelling(SHAPE, end, 20 + i) for i, end in enumerate((*LEFT_OVER, 1151, 1281))]
    ends = [len(text.q) - 1 for text in texts]
    both = list(zip(texts, ends, strict=True))
    assert_same(SHAPE, [alone(text, end) for text, end in both], teams, multiprocessors)
    assert_same(SHAPE, [reverified(text, end, 4) for text, end in both], teams, multiprocessors)
    trees = [node(text, end, (164, 163, 0, 162)) for text, end in both]
    assert_same(SHAPE, trees, teams, multiprocessors)
    # A row alone with ancestors in the tree gathers its own tiles.
    lone = [
        Branch(text, tree.tokens, tree.tree_start, tree.rows[5:6], tree.lineages[5:6])
        for (text, _), tree in zip(both, trees, strict=True)
    ]
    assert_same(SHAPE, lone, teams, multiprocessors)


def test_a_window_whose_last_slots_stand_first() -> None:
    """Chunk 32 takes the split of chunk 0: splits join in their order, not in that of the keys."""
    shape = Geometry(page_size=64, window=1500)
    text = Text.drawn(4500, shape, 13)
    branches = [reverified(text, position, 3) for position in (4100, 4300, 4490)]
    for teams in (2, 8):
        for multiprocessors in (1, 9):
            assert_same(shape, branches, teams, multiprocessors)


def test_a_window_that_is_split() -> None:
    shape = Geometry(page_size=64, window=1500)
    text = Text.drawn(2300, shape, 6)
    branches = [reverified(text, 2200, 3), reverified(text, 1600, 2), reverified(text, 40, 3)]
    for multiprocessors in (1, 30):
        assert_same(shape, branches, 8, multiprocessors)


def test_more_sequences_than_a_warp_has_lanes() -> None:
    text = Text.drawn(700, SHAPE, 7)
    branches = [alone(text, 17 * i) if i % 5 else EMPTY for i in range(40)]
    for multiprocessors in (3, 60):
        assert_same(SHAPE, branches, 8, multiprocessors)


def test_who_gets_splits_of_their_own() -> None:
    """Many sequences of engines for up to 16384 tokens; no windows of one split."""
    shape = Geometry(kv_heads=8, group=2, page_size=64)
    text = Text.drawn(300, shape, 8)
    many = Launch(shape, [alone(text, 200)] * 8, pages=257)
    assert many.entries() == ["attend_split_per_warp"]
    assert Launch(shape, [alone(text, 200)] * 7, pages=PAGES).entries() == ["attend_split"]
    windowed = Geometry(kv_heads=8, group=2, page_size=64, window=128)
    few_keys = Launch(windowed, [alone(text, 200)] * 16, pages=PAGES, tactic={"split_teams": 8})
    assert few_keys.entries() == ["attend_whole"]
    assert OP.tactics is not None
    long = Launch(shape, [alone(text, 200)] * 8, pages=273, tactic={"split_teams": 8})
    assert long.entries() == ["attend_split"]
    assert not any("context_ctas" in tactic for tactic in OP.tactics(long.request()))
    for launch in (many, Launch(shape, [alone(text, 9)], pages=PAGES)):
        asked = {tactic.get("split_teams") for tactic in OP.tactics(launch.request())}
        assert asked == {None, 0, 4, 8}
