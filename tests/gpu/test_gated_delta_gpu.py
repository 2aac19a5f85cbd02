"""Lazily committed states on a GPU: the bits of launches of one row, and prompts in chunks."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from test_lazy_gated_delta import NODES, by_kernel, chain, check_story
from test_prompt_chunks import Layer, check_against_rows, check_cuts

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
    """Use chains and trees of any form, of which any node is accepted."""
    drawn = np.random.default_rng(seed)

    def step() -> tuple[list[int], int]:
        tree = [-1, *(int(drawn.integers(0, node)) for node in range(1, NODES))]
        parents = tree if drawn.integers(2) else chain(NODES)
        return parents, int(drawn.integers(0, NODES))

    story = [[step(), step()] for _ in range(3)]
    check_story(partial(by_kernel, run=runner.run), story, seed)


# A part of the layers of 27B, 35B-A3B and 397B.
LAYERS = [Layer(2, 6, 128, 128), Layer(2, 4, 128, 128, decay=0.05), Layer(1, 4, 128, 128, decay=20)]


@pytest.mark.parametrize("layer", LAYERS, ids=["27B", "35B-A3B", "397B"])
@pytest.mark.parametrize("count", [64, 1000, 2500])
def test_the_error_of_chunks_is_within_the_documented_bound(
    runner: OpRunner, layer: Layer, count: int
) -> None:
    check_against_rows(layer, count, runner.run)


@pytest.mark.parametrize("layer", LAYERS, ids=["27B", "35B-A3B", "397B"])
def test_launch_boundaries_of_a_prompt_change_no_bit(runner: OpRunner, layer: Layer) -> None:
    cuts = [(64, 2436), (2048, 452), (1024, 1024, 452), (192, 2240, 68)]
    check_cuts(layer, 2500, cuts, runner.run)
