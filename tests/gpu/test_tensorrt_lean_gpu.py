"""TensorRT's lean runtime on a GPU: its plugins run every op, and it rejects invalid plans.

The lean runtime cannot build a plan, so no deserialized engine runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from called_plugins import LEAN, enqueue_called, lack, load
from plugin_cases import plugin_of, plugin_ops
from plugin_walk import build_walked

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.tuning.kernel_case import (
    KernelCase,
    bits,
    cases_for,
    kernel_case,
    phases_of,
)
from specbuild.builder.backends.cuda.tuning.op_runner import OpRunner
from specbuild.builder.backends.tensorrt.plugins.fields import plugin_record
from specbuild.plugins_cuda.launches import Lowering, Phase, Target
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.runtime.device import this_device
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.errors import SpecbuildError, UnsupportedHereError
from specbuild.runtime.executors.cuda.driver import DriverGpu, open_gpu
from specbuild.runtime.executors.tensorrt import loading
from specbuild.runtime.executors.tensorrt.executor import TensorRtExecutor
from specbuild.runtime.executors.tensorrt.library import new_runtime
from specbuild.runtime.executors.tensorrt.plugin_record import read_fields, write_fields

OPS = plugin_ops()


@pytest.fixture(scope="module")
def lean() -> ModuleType:
    reason = lack(LEAN)
    if reason is not None:
        pytest.skip(reason)
    return load(LEAN)


@pytest.fixture(scope="module")
def gpu() -> Iterator[DriverGpu]:
    opened = open_gpu()
    yield opened
    opened.close()


@cache
def forms(op: OpSpec) -> list[tuple[KernelCase, Phase, Lowering]]:
    """Return the first case of each phase that the kernels support."""
    cases = []
    for phase in phases_of(op):
        for case in cases_for(op, phase, gpu=False):
            drawn = kernel_case(op, case)
            try:
                cases.append((drawn, phase, drawn.lowering(phase, Target())))
            except SpecbuildError:
                continue
            break
    return cases


@pytest.fixture(scope="module")
def runner() -> OpRunner:
    """The GPU, with the kernels of every case."""
    opened = OpRunner(Compiler("sm_90a"))
    opened.prepare([lowering for op in OPS for _, _, lowering in forms(op)])
    return opened


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_enqueue_computes_the_bits_of_the_cuda_target(
    lean: ModuleType, runner: OpRunner, gpu: DriverGpu, op: OpSpec
) -> None:
    """C++ creates the plugin, attaches it, and enqueues it on a stream that is captured as a graph.

    The first call runs on the stream: a kernel cannot be loaded during capture.
    """
    cases = forms(op)
    assert cases
    for drawn, phase, lowering in cases:
        inputs = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
        outputs = {name: bits(tensor) for name, tensor in drawn.outputs.items()}
        expected = runner.run(op, lowering, inputs, outputs)
        drawn.check(expected)
        carried = plugin_of(drawn, phase, Target(), lowering)
        written = plugin_record(carried, runner.compiled(carried.kernels), "sm_90a")
        fields = write_fields(*written)
        record, _ = read_fields(fields)
        scratch = runner.allocate(record.workspace_bytes)

        def enqueue(place: Mapping[str, int], *, recorded: bool) -> None:
            addresses = [place[tensor.name] for tensor in record.tensors]  # noqa: B023
            stream = gpu.new_stream()
            if recorded:
                gpu.begin_capture(stream)
            enqueue_called(lean, gpu, fields, addresses, scratch, int(stream))  # noqa: B023
            if recorded:
                graph = gpu.end_capture(stream)
                gpu.launch_graph(graph, stream)
                gpu.synchronize(stream)
                gpu.release_graph(graph)
            gpu.synchronize(stream)

        try:
            for recorded in (False, True):
                result = runner.run(
                    op, lowering, inputs, outputs,
                    queue=lambda place, recorded=recorded: enqueue(place, recorded=recorded),
                )  # fmt: skip
                for name, actual in result.items():
                    defined = drawn.case.compare.get(name, np.s_[:])
                    np.testing.assert_array_equal(actual[defined], expected[name][defined], name)
        finally:
            runner.free(scratch)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as an engine of this backend whose plans are ONNX graphs."""
    output = tmp_path_factory.mktemp("lean") / "engine"
    build_walked(output)
    return output


def test_loading_succeeds_up_to_the_first_plan(
    lean: ModuleType, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, creators, the runtime and the roles without a plan are loaded."""
    monkeypatch.setattr(loading, "reasons_here", lambda *_: [])
    monkeypatch.setattr(loading, "load", lambda _: lean)
    manifest = read_manifest(directory)
    opened = loading.open_engine(directory, manifest, this_device(), threads=None, gpu=0)
    executor = opened.executor
    assert isinstance(executor, TensorRtExecutor)
    try:
        launched = [n for n, role in manifest.roles.items() if not role.file.endswith(".engine")]
        assert {"choose", "accept", "commit"} <= {*launched}
        executor.prepare(launched)
        with pytest.raises(UnsupportedHereError, match=r"TensorRT 11\S* refuses target\.engine"):
            executor.prepare(["target"])
    finally:
        executor.close()


FOREIGN = {
    "empty": b"",
    "zeros": bytes(4096),
    "text": b"this is no plan " * 64,
    "the header of TensorRT-RTX": b"vtrt" + bytes(24) + b"vtrt" + (16).to_bytes(4, "little"),
    "the tag of TensorRT, then nothing": b"ftrt" + bytes(60),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_rejects_invalid_plans(
    lean: ModuleType,
    gpu: DriverGpu,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    manifest = read_manifest(directory)
    monkeypatch.setattr(loading, "read_file", lambda *_: FOREIGN[name])
    open_session = loading.session_opener(lean, gpu, directory, manifest)
    with pytest.raises(UnsupportedHereError) as refusal:
        open_session("target")
    print(refusal.value)
    assert str(refusal.value).endswith("; build the engine again on this machine")


def test_the_runtime_uses_the_registry_of_the_plugins(lean: ModuleType, gpu: DriverGpu) -> None:
    gpu.use()
    errors: list[str] = []
    runtime = new_runtime(lean, errors)
    names = {creator.name for creator in runtime.get_plugin_registry().all_creators_recursive}
    assert {f"Specbuild{op.name}" for op in OPS} <= names
