"""What attention's launches have read before they wait: nothing that the launch in front writes."""

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

# bf16 bits of no drawn value: NaN of their own.
NEW = (0x7F93, 0x7F95)


def marked(inputs: dict[str, np.ndarray], sequences: Sequence[Branch[object]]) -> None:
    """Marks what the launch in front writes: entries of the launch's own rows, and its queries."""
    pools = [name for name in inputs if name.endswith("_pool")]
    for sequence, table in zip(sequences, inputs["page_table"][:, 0], strict=True):
        slots = np.array(sequence.rows)
        for name, mark in zip(pools, NEW, strict=False):
            size = inputs[name].shape[2]
            inputs[name][table[slots // size], :, slots % size] = mark
    del inputs["q"]


def early_rows(launch: OpLaunch, inputs: dict[str, np.ndarray]) -> int:
    """How many committed slots' entries some block has by then; no block has a marked one."""
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
    """Alone, as chains and as a tree; the last one's rows are those of several CTAs."""
    chains = [reverified(text, position, rows) for rows in (5, 9, min(position, 60))]
    return [alone(text, position), *chains, node(text, position, (164, 163, 0, 162))]


@emulated
@pytest.mark.parametrize("window", [0, 48, 128])
@pytest.mark.parametrize("position", [32, 126, *slow(31, 70)])
def test_tiles_of_the_launch_s_own_rows_wait(position: int, window: int) -> None:
    """Whole tiles in front of them are there already."""
    shape = Geometry(window=window)
    text, other = Text.drawn(200, shape, 5), Text.drawn(200, shape, 6)
    for branch in forms(text, position):
        launch = Launch(shape, [branch, reverified(other, 40, 3)])
        inputs = launch.inputs()
        [first, *_] = launch.lowering(inputs).launches
        assert first.reads_early
        marked(inputs, launch.sequences)
        # The other sequence's first tile at least, where no window cuts it.
        assert early_rows(first, inputs) >= 32 - max(0, 40 - window if window else 0)


@emulated
@pytest.mark.parametrize("position", [126, *slow(31, 70, 190)])
def test_teams_with_splits_of_their_own_wait_for_no_more(position: int) -> None:
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
        # A CTA stops in front of the first of its shares.
        old = min(*branch.rows, branch.tree_start)
        assert early_rows(first, inputs) >= min(32, old // 32 * 32)


@emulated
@pytest.mark.parametrize("position", [64, *slow(63, 130, 190)])
def test_absorbed_attention_waits_for_its_own_rows(position: int) -> None:
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
        # A CTA stops in front of the first of its splits.
        old = position + 1 - rows
        assert early_rows(first, inputs) >= min(64, old // 64 * 64)


@pytest.mark.parametrize(
    ("op", "case"),
    [(op, case) for op, cases in ((OP, CASES), (MLA, MLA_CASES)) for case in cases],
    ids=lambda of: of.name,
)
def test_a_sequence_s_first_row_stands_lowest(op: OpSpec, case: Case) -> None:
    """What kernels rely on: in the ops' cases as in the steps of an engine."""
    arrays = case.make(np.random.default_rng(1))
    given = dict(zip((spec.name for spec in op.inputs), arrays, strict=True))
    starts, slots, trees = (given[name] for name in ("row_start", "row_slot", "tree_start"))
    assert starts is not None and slots is not None and trees is not None
    for first, last, tree in zip(starts, starts[1:], trees, strict=False):
        rows = slots[first:last]
        assert len(rows) == 0 or min(rows[0], tree) == min(*rows, tree)
