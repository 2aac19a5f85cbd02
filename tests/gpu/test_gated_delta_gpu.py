"""Lazily committed states on a GPU: the bits of launches of one row."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from test_lazy_gated_delta import NODES, by_kernel, chain, check_story

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.tuning.op_runner import OpRunner


@pytest.fixture(scope="module")
def runner() -> OpRunner:
    """The GPU."""
    return OpRunner(Compiler("sm_90a"))


@pytest.mark.parametrize("seed", range(30))
def test_verified_and_committed_rows_have_the_bits_of_single_rows(
    runner: OpRunner, seed: int
) -> None:
    """Of chains and trees of any form, of which any node is accepted."""
    drawn = np.random.default_rng(seed)

    def step() -> tuple[list[int], int]:
        tree = [-1, *(int(drawn.integers(0, node)) for node in range(1, NODES))]
        parents = tree if drawn.integers(2) else chain(NODES)
        return parents, int(drawn.integers(0, NODES))

    story = [[step(), step()] for _ in range(3)]
    check_story(partial(by_kernel, run=runner.run), story, seed)
