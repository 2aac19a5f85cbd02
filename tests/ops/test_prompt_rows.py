"""Rows of prompts: kernels for many rows have the bits of those for few."""

from __future__ import annotations

import numpy as np
import pytest
from emulation import has_compiler, run_lowering

from specbuild.builder.backends.cuda.tuning.kernel_case import bits, kernel_case
from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.draft_input import lowering
from specbuild.plugins_cuda.draft_input.cases import inputs
from specbuild.plugins_cuda.draft_input.op import OP
from specbuild.plugins_cuda.launches import Target

CASES = (
    inputs(9, 296),
    inputs(10, 288, packed=True, rounding="offset"),
    inputs(17, 1312, embedding=False, segments=3),
    inputs(11, 264, embedding=False, rounding="gpt_oss", residual=True, factor=True),
)


@pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_many_rows_have_the_bits_of_few(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = kernel_case(OP, case)
    arrays = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
    blank = {name: np.zeros_like(bits(tensor)) for name, tensor in drawn.outputs.items()}
    results: dict[str, np.ndarray] = {}
    for fewest in (1, 1000):
        monkeypatch.setattr(lowering, "_MANY_ROWS", fewest)
        lowered = drawn.lowering("decode", Target())
        [launch] = lowered.launches
        results[launch.kernel.entry] = run_lowering(OP, lowered, arrays, blank)["u"]
    assert set(results) == {"draft_input_of_many", "draft_input"}
    np.testing.assert_array_equal(*results.values())
    assert results["draft_input"].any()
