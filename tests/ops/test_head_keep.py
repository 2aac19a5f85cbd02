"""HeadKeep in the emulator: its choices have HeadChoose's bits, its logits RmsHead's."""

from __future__ import annotations

import numpy as np
import pytest
from emulation import has_compiler, run_lowering

from specbuild.builder.backends.cuda.tuning.kernel_case import SMALL_TARGET, bits, kernel_case
from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.head_keep.cases import CASES, KERNEL_CASES
from specbuild.plugins_cuda.registry import op_named

pytestmark = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")

KEEPING = [case for case in (*CASES, *KERNEL_CASES) if not case.name.startswith("gpu")]


def run(op_name: str, case: Case) -> dict[str, np.ndarray]:
    drawn = kernel_case(op_named(op_name), case)
    inputs = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
    outputs = {name: bits(tensor) for name, tensor in drawn.outputs.items()}
    return run_lowering(drawn.op, drawn.lowering("decode", SMALL_TARGET), inputs, outputs)


def first_inputs(case: Case, count: int) -> Case:
    """Return the same arrays for an op that has the first inputs only."""

    def make(_: np.random.Generator) -> Arrays:
        return case.make(np.random.default_rng(3))[:count]

    return Case(case.name, make, case.attributes)


@pytest.mark.parametrize("case", KEEPING, ids=lambda case: case.name)
def test_keeping_logits_changes_no_bit(case: Case) -> None:
    """Choices equal those of HeadChoose; the logits of truncated rows equal RmsHead's."""
    case = first_inputs(case, 11)
    result = run("HeadKeep", case)
    alone = run("HeadChoose", first_inputs(case, 7))
    logits = run("RmsHead", first_inputs(case, 4))["logits"]
    for name in ("choice", "logprob"):
        np.testing.assert_array_equal(result[name], alone[name])
    drawn = kernel_case(op_named("HeadKeep"), case).inputs
    before = bits(drawn["kept"])
    some = (drawn["top_k"] > 0) | (drawn["top_p"] < 1) | (drawn["floor"] < 0)
    cut = np.asarray(some & (drawn["temperature"] > 0))
    assert 0 < cut.sum() < len(cut)
    np.testing.assert_array_equal(result["logits"][cut], logits[cut])
    np.testing.assert_array_equal(result["logits"][~cut], before[~cut])
