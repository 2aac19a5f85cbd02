"""Attention of heads wider than 128 in the emulator: the merge of splits by several CTAs."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from emulation import has_compiler, run_lowering

from specbuild.builder.backends.cuda.tuning.kernel_case import SMALL_TARGET, bits, kernel_case
from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.launches import Target
from specbuild.plugins_cuda.paged_tree_attention.cases import KERNEL_CASES
from specbuild.plugins_cuda.paged_tree_attention.op import OP

pytestmark = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")

# Those whose contexts have several splits: trees, a window, rows in pairs.
NAMES = (
    "heads of 256, longer than a split", "heads of 256, 11 on a KV head",
    "heads of 512, longer than a split", "heads of 256, rows without ancestors",
    "heads of 512, rows without ancestors",
)  # fmt: skip
WIDE = [case for case in KERNEL_CASES if case.name in NAMES]


@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name)
def test_several_ctas_merge_splits_to_the_bits_of_one(case: Case) -> None:
    """On a GPU each CTA merges a part of the columns, in the emulator the last one all parts."""
    drawn = kernel_case(OP, case)
    inputs = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
    ctas, results = [], []
    for target in (SMALL_TARGET, Target()):
        lowering = drawn.lowering("decode", target)
        (launch,) = lowering.launches
        constants = dict(launch.kernel.constants)
        ctas.append(constants["CONTEXT_CTAS"])
        # CTAs of a row wait for each other, and a multiprocessor has one.
        assert constants["CONTEXT_CTAS"] == 1 or prod(launch.grid) <= target.multiprocessors
        outputs = {name: bits(tensor) for name, tensor in drawn.outputs.items()}
        results.append(run_lowering(OP, lowering, inputs, outputs))
        drawn.check(results[-1])
    assert ctas[0] == 1 < ctas[1]
    rows = drawn.case.compare.get("attended", np.s_[:])
    np.testing.assert_array_equal(results[0]["attended"][rows], results[1]["attended"][rows])
