"""Every kernel against its op's reference, in the CPU emulator, over all cases and tactics."""

from __future__ import annotations

import pytest
from emulation import has_compiler, run_lowering

from specbuild.builder.backends.cuda.kernels.kernel_case import (
    SMALL_TARGET,
    bits,
    cases_for,
    kernel_case,
    kernel_ops,
    phases_of,
)
from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.launches import Phase, Tactic
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.runtime.errors import SpecbuildError

pytestmark = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")

FORMS = [
    (op, phase, case)
    for op in kernel_ops()
    for phase in phases_of(op)
    for case in cases_for(op, phase, gpu=False)
]


def run(op: OpSpec, phase: Phase, case: Case, tactic: Tactic | None = None) -> None:
    drawn = kernel_case(op, case)
    try:
        lowering = drawn.lowering(phase, SMALL_TARGET, tactic)
    except SpecbuildError as refusal:
        pytest.skip(f"the kernels refuse it: {refusal}")
    inputs = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
    outputs = {name: bits(tensor) for name, tensor in drawn.outputs.items()}
    drawn.check(run_lowering(op, lowering, inputs, outputs))


@pytest.mark.parametrize(
    ("op", "phase", "case"), FORMS, ids=[f"{o.name}-{p}: {c.name}" for o, p, c in FORMS]
)
def test_kernels_agree_with_the_reference(op: OpSpec, phase: Phase, case: Case) -> None:
    run(op, phase, case)


@pytest.mark.parametrize("op", kernel_ops(), ids=lambda op: op.name)
def test_every_tactic_agrees_with_the_reference(op: OpSpec) -> None:
    if op.tactics is None:
        pytest.skip("the op has one form only")
    for phase in phases_of(op):
        case = cases_for(op, phase, gpu=False)[-1]
        for tactic in op.tactics(kernel_case(op, case).request(phase, SMALL_TARGET)):
            run(op, phase, case, tactic)
