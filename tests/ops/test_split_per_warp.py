"""Attention with one split per warp, in the emulator: the bits of the default kernel."""

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
    """Run a launch whose grid fills a GPU with this number of multiprocessors."""
    launch = Launch(
        shape, branches, padding_rows=padding, pages=PAGES, seed=3,
        tactic={"split_teams": teams}, target=Target(multiprocessors=multiprocessors),
    )  # fmt: skip
    assert launch.entries() == ["attend_split_per_warp"]
    return launch.attended()


def by_default_kernel(shape: Geometry, branch: Branch[Text]) -> np.ndarray:
    """Return the result of the default kernel for this sequence alone."""
    launch = Launch(shape, [branch], pages=PAGES, tactic={"split_teams": 0})
    assert launch.entries() == ["attend_split"]
    return launch.attended()[0]


def assert_same(
    shape: Geometry, branches: list[Branch[Text]], teams: int, multiprocessors: int
) -> None:
    results = attended(shape, branches, teams, multiprocessors)
    for index, (rows, branch) in enumerate(zip(results, branches, strict=True)):
        if branch.rows:
            np.testing.assert_array_equal(
                rows, by_default_kernel(shape, branch), err_msg=str(index)
            )


@pytest.mark.parametrize(
    ("teams", "multiprocessors"), [(2, 3), (8, 1), (8, 70), *slow((2, 1), (2, 70), (8, 3))]
)
def test_rows_have_the_bits_of_the_default_kernel(teams: int, multiprocessors: int) -> None:
    """One CTA processes all sequences in turn, or each has one, or the long one has several."""
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
def test_trees_have_the_bits_of_the_default_kernel(multiprocessors: int) -> None:
    """Cover per-row tiles, in the tree's copy or gathered, and more rows than a CTA processes."""
    text, other = Text.drawn(1300, SHAPE, 1), Text.drawn(300, SHAPE, 2)
    for position in (2, 66, 127, 129, 1200):
        tree = node(text, position, (164, 163, 0, 162))
        branches = [node(other, 40, (3, 4, 5, 6)), tree, alone(other, 250)]
        assert_same(SHAPE, branches, 8, multiprocessors)
    assert_same(SHAPE, [wide_node(text, 257), reverified(other, 290, 19)], 8, multiprocessors)
    # One row with ancestors in the tree: drafting after scattered slots.
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
    """Return values that cancel over the keys up to ``position``, so that only rounding remains.

    Another order of fp32 sums therefore gives other bits in bf16, too.
    """
    text, rng = Text.drawn(position + 1, shape, seed), np.random.default_rng(seed)
    values = rng.normal(size=text.v.shape) * 2.0 ** rng.integers(-12, 13, text.v.shape)
    order = rng.permutation(position + 1)
    half = len(order) // 2
    values[order[half : 2 * half]] = -values[order[:half]]
    return Text(text.q, np.zeros_like(text.k), bits(torch.from_numpy(values).bfloat16()))


LEFT_OVER = [128 * slots - 1 - 13 * slots for slots in (9, 10, 11, 12, 13, 14, 15)]


@pytest.mark.parametrize(("teams", "multiprocessors"), [(8, 7), *slow((4, 1), (4, 7), (8, 1))])
def test_remaining_splits_are_divided_into_runs_of_tiles(teams: int, multiprocessors: int) -> None:
    """After full rounds, one to seven splits remain, of one CTA or of several.

    Five rows and more need two warps of a group, so a CTA then has four groups.
    """
    texts = [cancelling(SHAPE, end, 20 + i) for i, end in enumerate((*LEFT_OVER, 1151, 1281))]
    ends = [len(text.q) - 1 for text in texts]
    both = list(zip(texts, ends, strict=True))
    assert_same(SHAPE, [alone(text, end) for text, end in both], teams, multiprocessors)
    assert_same(SHAPE, [reverified(text, end, 4) for text, end in both], teams, multiprocessors)
    trees = [node(text, end, (164, 163, 0, 162)) for text, end in both]
    assert_same(SHAPE, trees, teams, multiprocessors)
    # One row with ancestors in the tree gathers its own tiles.
    lone = [
        Branch(text, tree.tokens, tree.tree_start, tree.rows[5:6], tree.lineages[5:6])
        for (text, _), tree in zip(both, trees, strict=True)
    ]
    assert_same(SHAPE, lone, teams, multiprocessors)


def test_a_window_that_wraps_around_its_slots() -> None:
    """Chunk 32 reuses the split of chunk 0: splits are joined in slot order, not in key order."""
    shape = Geometry(page_size=64, window=1500)
    text = Text.drawn(4500, shape, 13)
    branches = [reverified(text, position, 3) for position in (4100, 4300, 4490)]
    for teams in (2, 8):
        for multiprocessors in (1, 9):
            assert_same(shape, branches, teams, multiprocessors)


def test_a_window_of_several_splits() -> None:
    shape = Geometry(page_size=64, window=1500)
    text = Text.drawn(2300, shape, 6)
    branches = [reverified(text, 2200, 3), reverified(text, 1600, 2), reverified(text, 40, 3)]
    for multiprocessors in (1, 30):
        assert_same(shape, branches, 8, multiprocessors)


def test_over_32_sequences() -> None:
    text = Text.drawn(700, SHAPE, 7)
    branches = [alone(text, 17 * i) if i % 5 else EMPTY for i in range(40)]
    for multiprocessors in (3, 60):
        assert_same(SHAPE, branches, 8, multiprocessors)


def test_which_launches_use_split_per_warp() -> None:
    """Many sequences of engines for up to 16384 tokens use it, but not windows of one split."""
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
        proposed = {tactic.get("split_teams") for tactic in OP.tactics(launch.request())}
        assert proposed == {None, 0, 4, 8}
