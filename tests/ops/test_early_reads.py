"""Data that attention kernels read before they wait: none that the previous launch writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from attention_launches import Geometry, Launch, Text
from emulation import has_compiler, staged_before_the_wait, tensor_info
from launch_branches import Branch, alone, node, reverified
from left_out import slow
from test_latent_kernels import ABSORBED
from test_latent_kernels import Launch as LatentLaunch
from test_latent_kernels import Text as LatentText

from specbuild.builder.backends.cuda.tuning.kernel_case import SMALL_TARGET
from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.launches import LoweringRequest, OpLaunch, Target
from specbuild.plugins_cuda.mla_attention.cases import CASES as MLA_CASES
from specbuild.plugins_cuda.mla_attention.op import OP as MLA
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.paged_tree_attention.cases import CASES
from specbuild.plugins_cuda.paged_tree_attention.op import OP

emulated = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")

# bf16 NaNs that no drawn value equals.
NEW = (0x7F93, 0x7F95)


def marked(inputs: dict[str, np.ndarray], sequences: Sequence[Branch[object]]) -> None:
    """Mark the data that the previous launch writes: entries of own rows, and queries."""
    pools = [name for name in inputs if name.endswith("_pool")]
    for sequence, table in zip(sequences, inputs["page_table"][:, 0], strict=True):
        slots = np.array(sequence.rows)
        for name, mark in zip(pools, NEW, strict=False):
            size = inputs[name].shape[2]
            inputs[name][table[slots // size], :, slots % size] = mark
    del inputs["q"]


def early_rows(launch: OpLaunch, inputs: dict[str, np.ndarray]) -> int:
    """Return how many committed slots some block has staged.

    Assert that none staged a marked entry.
    """
    pool = next(inputs[name] for name in inputs if name.endswith("_pool"))
    staged: set[int] = set()
    for shared in staged_before_the_wait(launch, inputs):
        values = shared.view(np.uint16)
        assert not np.isin(values, NEW).any()
        staged |= set(values.tolist())
    sequences = zip(inputs["page_table"][:, 0], inputs["tree_start"], strict=True)
    return sum(
        set(pool[table[slot // pool.shape[2]], 0, slot % pool.shape[2]].tolist()) <= staged
        for table, start in sequences
        for slot in range(int(start))
    )


def forms(text: Text, position: int) -> list[Branch[Text]]:
    """Return the token alone, in chains and in a tree; the last chain has rows of several CTAs."""
    chains = [reverified(text, position, rows) for rows in (5, 9, min(position, 60))]
    return [alone(text, position), *chains, node(text, position, (164, 163, 0, 162))]


@emulated
@pytest.mark.parametrize("window", [0, 48, 128])
@pytest.mark.parametrize("position", [32, 126, *slow(31, 70)])
def test_tiles_with_own_rows_are_read_after_the_wait(position: int, window: int) -> None:
    """Earlier tiles without such rows are staged before the wait."""
    shape = Geometry(window=window)
    text, other = Text.drawn(200, shape, 5), Text.drawn(200, shape, 6)
    for branch in forms(text, position):
        launch = Launch(shape, [branch, reverified(other, 40, 3)])
        inputs = launch.inputs()
        [first, *_] = launch.lowering(inputs).launches
        assert first.reads_early
        marked(inputs, launch.sequences)
        # At least the other sequence's first tile is staged, unless a window excludes it.
        assert early_rows(first, inputs) >= 32 - max(0, 40 - window if window else 0)


@emulated
@pytest.mark.parametrize("position", [126, *slow(31, 70, 190)])
def test_split_per_warp_reads_other_tiles_early(position: int) -> None:
    shape = Geometry(page_size=64)
    text, other = Text.drawn(200, shape, 5), Text.drawn(200, shape, 6)
    for branch in forms(text, position)[:4]:
        launch = Launch(
            shape, [branch, reverified(other, 40, 3)], pages=72, tactic={"split_teams": 8},
            target=Target(multiprocessors=3),
        )  # fmt: skip
        inputs = launch.inputs()
        [first] = launch.lowering(inputs).launches
        assert first.kernel.entry == "attend_split_per_warp" and first.reads_early
        marked(inputs, launch.sequences)
        # A CTA stops at the first tile with own rows of its first split.
        old = min(*branch.rows, branch.tree_start)
        assert early_rows(first, inputs) >= min(32, old // 32 * 32)


@emulated
@pytest.mark.parametrize("width", [256, *slow(512)])
@pytest.mark.parametrize("position", [126, *slow(31, 70)])
def test_wide_heads_read_their_first_tile_early(position: int, width: int) -> None:
    shape = Geometry(width=width)
    text, other = Text.drawn(200, shape, 5), Text.drawn(200, shape, 6)
    for branch in forms(text, position):
        launch = Launch(shape, [branch, reverified(other, 80, 3)])
        inputs = launch.inputs()
        [first] = launch.lowering(inputs).launches
        assert first.kernel.entry == "attend_wide" and first.reads_early
        marked(inputs, launch.sequences)
        assert early_rows(first, inputs) >= 64 // (width // 256)


@emulated
@pytest.mark.parametrize("position", [64, *slow(63, 130, 190)])
def test_absorbed_attention_reads_own_rows_after_the_wait(position: int) -> None:
    text, other = LatentText.drawn(200, ABSORBED, 5), LatentText.drawn(200, ABSORBED, 6)
    chains = [reverified(text, position, rows) for rows in (1, 4, 20)]
    for branch in (*chains, node(text, position, (164, 163, 0, 162))):
        launch = LatentLaunch(ABSORBED, [branch, reverified(other, 150, 3)])
        inputs = launch.inputs()
        outputs = {"attended": np.zeros((len(inputs["q"]), 5, ABSORBED.width), np.uint16)}
        shapes = {name: tensor_info(a) for name, a in (*inputs.items(), *outputs.items())}
        attributes = {"scale": ABSORBED.width**-0.5, "window": 0}
        request = LoweringRequest(shapes, attributes, "decode", SMALL_TARGET)
        assert MLA.lower is not None
        [first, *_] = MLA.lower(request).launches
        assert first.kernel.entry == "attend_absorbed" and first.reads_early
        rows = len(inputs["q"])
        marked(inputs, launch.sequences)
        # A CTA stops at the first of its splits that has own rows.
        old = position + 1 - rows
        assert early_rows(first, inputs) >= min(64, old // 64 * 64)


@pytest.mark.parametrize(
    ("op", "case"),
    [(op, case) for op, cases in ((OP, CASES), (MLA, MLA_CASES)) for case in cases],
    ids=lambda of: of.name,
)
def test_the_first_row_of_a_sequence_has_the_lowest_slot(op: OpSpec, case: Case) -> None:
    """Kernels rely on this order, in the ops' cases as in the steps of an engine."""
    arrays = case.make(np.random.default_rng(1))
    named = dict(zip((spec.name for spec in op.inputs), arrays, strict=True))
    starts, slots, trees = (named[name] for name in ("row_start", "row_slot", "tree_start"))
    assert starts is not None and slots is not None and trees is not None
    for first, last, tree in zip(starts, starts[1:], trees, strict=False):
        rows = slots[first:last]
        assert len(rows) == 0 or min(rows[0], tree) == min(*rows, tree)
