"""What attention's launches have read before they wait: nothing that the launch in front writes."""

from __future__ import annotations

import numpy as np
import pytest
from attention_launches import Geometry, Launch, Text
from emulation import has_compiler, staged_before_the_wait
from launch_branches import alone, node, refed

pytestmark = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")

# bf16 bits of no drawn value: NaN of two kinds.
NEW_KEY, NEW_VALUE = 0x7F93, 0x7F95
PAGE = Geometry().page_size


@pytest.mark.parametrize("window", [0, 48, 128])
@pytest.mark.parametrize("position", [31, 32, 70, 100, 126])
def test_tiles_of_the_launch_s_own_rows_wait(position: int, window: int) -> None:
    """Alone, as a chain and as a tree; whole tiles in front of them are there already."""
    shape = Geometry(window=window)
    text = Text.drawn(200, shape, 5)
    branches = [alone(text, position), refed(text, position, 5), refed(text, position, 9)]
    for branch in (*branches, node(text, position, (164, 163, 0, 162))):
        launch = Launch(shape, [branch])
        inputs = launch.inputs()
        slots = np.array(branch.rows)
        pages = inputs["page_table"][0, 0][slots // PAGE]
        inputs["k_pool"][pages, :, slots % PAGE] = NEW_KEY
        inputs["v_pool"][pages, :, slots % PAGE] = NEW_VALUE
        # What the launch in front makes.
        del inputs["q"]
        [first, *_] = launch.lowering(launch.inputs()).launches
        assert first.reads_early
        staged = staged_before_the_wait(first, inputs).view(np.uint16)
        assert not np.isin(staged, (NEW_KEY, NEW_VALUE)).any()
        old = min(*branch.rows, branch.tree_start) // 32
        rows = inputs["page_table"][0, 0][: 2 * old].reshape(-1)
        oldest = max(0, branch.rows[0] - window + 1) if window else 0
        if old > -(-oldest // 32):
            last = inputs["k_pool"][rows[-1], 0, -1]
            assert np.isin(last, staged).all(), "no tile was asked for early"
