"""Every kernel against its op's reference on a GPU, at test and at real sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specbuild.builder.backends.cuda.kernels.kernel_case import (
    GPU_ONLY,
    KernelCase,
    bits,
    cases_for,
    kernel_case,
    kernel_ops,
    phases_of,
)
from specbuild.builder.backends.cuda.kernels.nvrtc import Compiler, SpillError
from specbuild.builder.backends.cuda.kernels.op_runner import OpRunner
from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.launches import Lowering, Phase, Tactic, Target
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.runtime.errors import SpecbuildError

FORMS = [
    (op, phase, case)
    for op in kernel_ops()
    for phase in phases_of(op)
    for case in cases_for(op, phase, gpu=True)
]


@pytest.fixture(scope="session")
def runner() -> Iterator[OpRunner]:
    """The GPU."""
    yield OpRunner(Compiler("sm_90a"))


def lowered(drawn: KernelCase, phase: Phase, tactic: Tactic | None = None) -> Lowering:
    try:
        return drawn.lowering(phase, Target(), tactic)
    except SpecbuildError as refusal:
        pytest.skip(f"the kernels refuse it: {refusal}")


def compiling(runner: OpRunner, drawn: KernelCase, phase: Phase) -> Iterator[Lowering]:
    """By every tactic, the default first; a build leaves out those that spill registers."""
    assert drawn.op.tactics is not None
    for tactic in drawn.op.tactics(drawn.request(phase, Target())):
        lowering = lowered(drawn, phase, tactic)
        try:
            runner.prepare([lowering])
        except SpillError as refusal:
            print(refusal)
        else:
            yield lowering


def run(runner: OpRunner, drawn: KernelCase, lowering: Lowering) -> None:
    inputs = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
    outputs = {name: bits(tensor) for name, tensor in drawn.outputs.items()}
    drawn.check(runner.run(drawn.op, lowering, inputs, outputs))


@pytest.mark.parametrize(
    ("op", "phase", "case"), FORMS, ids=[f"{o.name}-{p}: {c.name}" for o, p, c in FORMS]
)
def test_kernels_agree_with_the_reference(
    runner: OpRunner, op: OpSpec, phase: Phase, case: Case
) -> None:
    drawn = kernel_case(op, case)
    lowering = lowered(drawn, phase)
    try:
        run(runner, drawn, lowering)
    except SpillError:
        run(runner, drawn, next(compiling(runner, drawn, phase)))


REAL = [(o, p, c) for o, p, c in FORMS if c.name.startswith(GPU_ONLY) and o.tactics is not None]


@pytest.mark.parametrize(
    ("op", "phase", "case"), REAL, ids=[f"{o.name}-{p}: {c.name}" for o, p, c in REAL]
)
def test_every_tactic_agrees_at_real_sizes(
    runner: OpRunner, op: OpSpec, phase: Phase, case: Case
) -> None:
    drawn = kernel_case(op, case)
    lowerings = list(compiling(runner, drawn, phase))
    assert lowerings
    for lowering in lowerings:
        run(runner, drawn, lowering)
