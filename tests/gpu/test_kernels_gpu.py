"""Every kernel against its op's reference on a GPU, at test and at real sizes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from plugin_cases import plugin_of

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.tuning.kernel_case import (
    GPU_ONLY,
    KernelCase,
    bits,
    cases_for,
    kernel_case,
    kernel_ops,
    phases_of,
)
from specbuild.builder.backends.cuda.tuning.op_runner import OpRunner
from specbuild.builder.backends.tensorrt.plugins.fields import plugin_record
from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.launches import Lowering, Phase, Tactic, Target
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.driver import DriverGpu, open_gpu
from specbuild.runtime.executors.tensorrt.op_launches import OpLauncher
from specbuild.runtime.executors.tensorrt.plugin_record import read_fields, write_fields

# The phases of a case are consecutive, so its inputs and reference are computed once.
FORMS = sorted(
    (
        (op, phase, case)
        for op in kernel_ops()
        for phase in phases_of(op)
        for case in cases_for(op, phase, gpu=True)
    ),
    key=lambda form: (form[0].name, form[2].name),
)


Queue = Callable[[Mapping[str, int]], None] | None


@pytest.fixture(scope="session")
def runner() -> Iterator[OpRunner]:
    """The GPU."""
    yield OpRunner(Compiler("sm_90a"))


@pytest.fixture(scope="session")
def gpu(runner: OpRunner) -> Iterator[DriverGpu]:
    """The same GPU in the runtime."""
    opened = open_gpu()
    yield opened
    opened.close()


_DRAWN: dict[int, KernelCase] = {}


def drawn_case(op: OpSpec, case: Case) -> KernelCase:
    """Return the inputs and the reference of a case; the last one is cached, some take 10 GB.

    At real sizes the reference runs on the GPU, in the same types; a processor takes a minute.
    """
    if id(case) not in _DRAWN:
        _DRAWN.clear()
        real_size = case.name.startswith(GPU_ONLY)
        if real_size:
            gc.collect()  # frames of a skipped or failed test refer to its case, in cycles
        on_gpu = real_size and torch.cuda.is_available()
        torch.backends.cuda.matmul.allow_tf32 = False
        _DRAWN[id(case)] = kernel_case(op, case, "cuda" if on_gpu else "cpu")
        if on_gpu:
            torch.cuda.empty_cache()  # for the other workers
    return _DRAWN[id(case)]


def lowered(drawn: KernelCase, phase: Phase, tactic: Tactic | None = None) -> Lowering:
    try:
        return drawn.lowering(phase, Target(), tactic)
    except SpecbuildError as refusal:
        pytest.skip(f"the kernels refuse it: {refusal}")


def compiling(runner: OpRunner, drawn: KernelCase, phase: Phase) -> Iterator[Lowering]:
    """Yield the lowerings of every tactic, the default first, except those that spill registers."""
    default = lowered(drawn, phase)
    assert drawn.op.tactics is not None
    for tactic in drawn.op.tactics(drawn.request(phase, Target())):
        lowering = lowered(drawn, phase, tactic) if tactic else default
        refused = runner.refusal(lowering)
        if refused is None:
            yield lowering
        else:
            print(refused.reason)


Run = Callable[[Lowering, Queue], None]


@contextmanager
def running(runner: OpRunner, drawn: KernelCase) -> Iterator[Run]:
    """Yield a function that runs a lowering of a case and checks its outputs."""
    inputs = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
    outputs = {name: bits(tensor) for name, tensor in drawn.outputs.items()}
    with runner.resident(drawn.op, inputs) as resident:

        def run(lowering: Lowering, queue: Queue = None) -> None:
            drawn.check(
                runner.run(drawn.op, lowering, inputs, outputs, queue=queue, resident=resident)
            )

        yield run


def run_as_plugin(
    runner: OpRunner,
    gpu: DriverGpu,
    drawn: KernelCase,
    phase: Phase,
    lowering: Lowering,
    run: Run,
) -> None:
    """Run ``enqueue`` of a TensorRT plugin within a CUDA graph, without TensorRT."""
    plugin = plugin_of(drawn, phase, Target(), lowering)
    written = plugin_record(plugin, runner.compiled(plugin.kernels), "sm_90a")
    record, cubins = read_fields(write_fields(*written))
    launcher = OpLauncher(gpu, record, cubins)
    launcher.prepare(0)
    guard = 256
    scratch = runner.allocate(record.workspace_bytes + guard)

    def queue(place: Mapping[str, int]) -> None:
        stream = gpu.new_stream()
        gpu.begin_capture(stream)
        launcher.enqueue(0, [place[tensor.name] for tensor in record.tensors], scratch, stream)
        graph = gpu.end_capture(stream)
        gpu.launch_graph(graph, stream)
        gpu.synchronize(stream)
        gpu.release_graph(graph)

    try:
        run(lowering, queue)
        behind = runner.download(scratch + record.workspace_bytes, np.empty(guard, np.uint8))
        assert (behind == 0xFF).all(), "a kernel wrote outside of the workspace"
    finally:
        runner.free(scratch)


@pytest.mark.parametrize(
    ("op", "phase", "case"), FORMS, ids=[f"{o.name}-{p}: {c.name}" for o, p, c in FORMS]
)
def test_kernels_agree_with_the_reference(
    runner: OpRunner, gpu: DriverGpu, op: OpSpec, phase: Phase, case: Case
) -> None:
    """Use the tactic of a build, also as a plugin's launches; at real sizes, use every tactic."""
    drawn = drawn_case(op, case)
    if op.tactics is None:
        lowerings = [lowered(drawn, phase)]
    elif case.name.startswith(GPU_ONLY):
        lowerings = list(compiling(runner, drawn, phase))
    else:
        lowerings = [next(compiling(runner, drawn, phase))]
    runner.prepare(lowerings)
    with running(runner, drawn) as run:
        for lowering in lowerings:
            run(lowering, None)
        # Plugins cannot access the memory of other ranks: TensorRT engines have one rank.
        if op.contribution is None:
            run_as_plugin(runner, gpu, drawn, phase, lowerings[0], run)
