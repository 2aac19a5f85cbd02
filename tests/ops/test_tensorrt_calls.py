"""Plugins called from C++ by TensorRT's own code: its lean runtime, and TensorRT-RTX's library."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from called_plugins import (
    LEAN,
    MODULES,
    bucket_tensors,
    created,
    dynamic,
    enqueue_called,
    lack,
    load,
    registered,
)
from emulation import has_compiler, run_lowering
from plugin_cases import EmulatedGpu, every_case, plugin_of, plugin_ops, run_plugin
from tensorrt_caller import BUILD, DATA_TYPES, RUNTIME, tensor_descs

from specbuild.builder.backends.cuda.tuning.kernel_case import (
    SMALL_TARGET,
    bits,
    cases_for,
    kernel_case,
    phases_of,
)
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.tensorrt import library as runtime_library
from specbuild.runtime.executors.tensorrt import loading, plugin, sessions
from specbuild.runtime.executors.tensorrt.plugin_record import (
    CUBINS,
    DESCRIPTION,
    NAMESPACE,
    read_fields,
)

OPS = pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)


@pytest.fixture(scope="module", params=MODULES)
def trt(request: pytest.FixtureRequest) -> ModuleType:
    reason = lack(request.param)
    if reason is not None:
        pytest.skip(reason)
    return load(request.param)


@pytest.fixture
def lean() -> ModuleType:
    reason = lack(LEAN)
    if reason is not None:
        pytest.skip(reason)
    return load(LEAN)


@pytest.fixture(scope="module")
def cases() -> Mapping[str, list[dict[str, bytes]]]:
    """Return the fields of a plugin for each case of each op."""
    return {op.name: [fields for _, fields in every_case(op)] for op in plugin_ops()}


def test_the_lean_runtime_has_all_names_that_loading_uses(lean: ModuleType) -> None:
    """A plugin compares the names of tensor formats during a build, so only those may be absent."""
    used = set()
    for module in (plugin, sessions, loading, runtime_library):
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                holder = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                if holder in ("trt", "_trt", "library", "_library"):
                    used.add(node.attr)
    assert {"IPluginV3OneBuildV2", "PluginFieldCollection_", "Runtime"} <= used
    assert {name for name in used if not hasattr(lean, name)} == {"TensorFormat"}


@OPS
def test_interfaces_of_a_creator_and_its_plugins(
    trt: Any, cases: Mapping[str, list[dict[str, bytes]]], op: OpSpec
) -> None:
    for fields in cases[op.name]:
        record, _ = read_fields(fields)
        identity = (record.name, record.plugin_version, NAMESPACE)
        creator = registered(trt, record)
        assert creator.info == ("PLUGIN CREATOR_V3ONE", 1, 0)
        assert (creator.identity, creator.field_names) == (identity, [DESCRIPTION, CUBINS])
        for phase in (BUILD, RUNTIME):
            plugin = creator.create("node", fields, phase)
            assert plugin is not None
            attached = plugin.attach()
            assert attached is not None
            for each in (plugin, plugin.clone(), attached):
                assert each.info == ("PLUGIN", 1, 0)
                assert each.core.info == ("PLUGIN_V3ONE_CORE", 1, 0)
                # Version 2 is the interface with aliased inputs.
                assert each.build.info == ("PLUGIN_V3ONE_BUILD", 2, 0)
                assert each.runtime.info == ("PLUGIN_V3ONE_RUNTIME", 1, 0)
                assert each.identity == identity
                assert each.fields() == fields
            again = creator.create("node", plugin.fields(), RUNTIME)
            assert again is not None and again.fields() == fields


@OPS
def test_answers_of_the_build_interface(
    trt: Any, cases: Mapping[str, list[dict[str, bytes]]], op: OpSpec
) -> None:
    for fields in cases[op.name]:
        record, _ = read_fields(fields)
        plugin = created(trt, fields, BUILD)
        inputs, outputs = bucket_tensors(record)
        count = len(outputs)
        assert (plugin.num_outputs, plugin.format_limit) == (len(op.outputs), 1)
        assert plugin.output_types([t for t, _ in inputs], count) == [
            DATA_TYPES[dtype] for dtype, _ in outputs
        ]
        shapes = [record.buckets[0].inputs[i] for i in range(len(inputs))]
        assert plugin.output_shapes(shapes, count) == list(record.buckets[0].outputs)
        aliases = dict(op.aliases)
        assert [plugin.aliased_input(i) for i in range(count)] == [
            next((i for i, t in enumerate(record.inputs) if aliases.get(o.name) == t.name), -1)
            for o in record.outputs
        ]
        descs = dynamic(record)
        assert plugin.configure(*descs) == 0
        assert plugin.workspace_bytes(*descs) == record.workspace_bytes
        assert plugin.tactics() == []
        timing, description = plugin.texts
        assert len(timing) == 64
        assert description == f"{op.name} {record.version} sm_90a"
        if trt.__name__ == LEAN:
            continue  # its bindings cannot read the format of a description
        tensors = (type(descs[0][0]) * (len(inputs) + count))(*descs[0], *descs[1])
        for position, tensor in enumerate(tensors):
            assert plugin.supports(position, tensors, len(inputs))
            tensor.desc.format = 2  # kCHW2
            assert not plugin.supports(position, tensors, len(inputs))
            tensor.desc.format, tensor.desc.type = 0, 1  # kHALF
            assert not plugin.supports(position, tensors, len(inputs))
            tensor.desc.type = DATA_TYPES[[*inputs, *outputs][position][0]]


def test_rejects_wrong_fields_and_shapes_with_a_message(
    trt: Any, cases: Mapping[str, list[dict[str, bytes]]], capfd: pytest.CaptureFixture[str]
) -> None:
    """TensorRT prints the exception of a plugin and gets no plugin, or a nonzero status."""
    fields = cases["KvWrite"][0]
    record, _ = read_fields(fields)
    creator = registered(trt, record)
    damaged = fields[DESCRIPTION].replace(b'"format":1', b'"format":9')
    assert damaged != fields[DESCRIPTION]
    for wrong, sentence in (
        ({}, "a plugin node lacks the fields ['description', 'cubins']; build the engine again"),
        (fields | {DESCRIPTION: damaged}, "a plugin node has format 9, this specbuild reads 1"),
        (fields | {DESCRIPTION: fields[DESCRIPTION][:-9]}, "a plugin node cannot be read"),
        (fields | {CUBINS: b"{}"}, "plugin SpecbuildKvWrite is malformed (kernels ["),
        (cases["KvCommit"][0], "its fields are those of SpecbuildKvCommit"),
    ):
        assert creator.create("layers.0", wrong, RUNTIME) is None
        assert sentence in " ".join(capfd.readouterr().err.split())
    plugin = creator.create("layers.0", fields, RUNTIME)
    assert plugin is not None
    inputs, outputs = bucket_tensors(record)
    dtype, shape = inputs[0]
    inputs[0] = (dtype, (*shape[:-1], shape[-1] + 1))
    assert plugin.change_shapes(tensor_descs(inputs), tensor_descs(outputs)) != 0
    assert "SpecbuildKvWrite has no launches for inputs of shapes" in capfd.readouterr().err


def test_a_creator_is_found_by_name_version_and_namespace(
    trt: Any, cases: Mapping[str, list[dict[str, bytes]]]
) -> None:
    record, _ = read_fields(cases["KvWrite"][0])
    creator = registered(trt, record)
    registry = trt.get_plugin_registry()
    registered_creator = registry.get_creator(record.name, record.plugin_version, NAMESPACE)
    assert registered_creator is not None and registered_creator.name == creator.identity[0]
    for other in (
        (record.name, "1.999", NAMESPACE),
        (record.name, record.plugin_version, ""),
        ("SpecbuildNothing", record.plugin_version, NAMESPACE),
    ):
        assert registry.get_creator(*other) is None


WITHOUT_A_DRIVER = """
import sys
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.tensorrt.library import new_runtime
library = __import__(sys.argv[1])
try:
    new_runtime(library, [])
except SpecbuildError as error:
    print(error)
else:
    print("made")
"""


def test_a_runtime_that_cannot_be_created_is_an_error(trt: ModuleType) -> None:
    """The library returns an object around a null pointer, which must not be used or freed."""
    command = [sys.executable, "-c", WITHOUT_A_DRIVER, trt.__name__]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    if ended.stdout == "made\n":
        pytest.skip("a driver is installed, or the library needs none for this")
    assert ended.stdout.startswith(f"TensorRT {trt.__version__} cannot use this GPU (")
    assert "CUDA" in ended.stdout
    assert ended.stdout.endswith("; install a newer driver, or build with --backend cuda\n")


@pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
@OPS
def test_enqueue_has_the_results_of_the_cuda_target(lean: Any, op: OpSpec) -> None:
    """In the kernel emulator, for the first case of each phase."""

    def enqueue(gpu: EmulatedGpu, fields: dict[str, bytes], addresses: Any, scratch: int) -> None:
        enqueue_called(lean, gpu, fields, addresses, scratch)

    ran = 0
    for phase in phases_of(op):
        for case in cases_for(op, phase, gpu=False):
            drawn = kernel_case(op, case)
            try:
                lowering = drawn.lowering(phase, SMALL_TARGET)
            except SpecbuildError:
                continue
            inputs = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
            outputs = {name: bits(tensor) for name, tensor in drawn.outputs.items()}
            expected = run_lowering(op, lowering, inputs, outputs)
            carried = plugin_of(drawn, phase, SMALL_TARGET, lowering)
            for name, ours in run_plugin(drawn, carried, inputs, outputs, enqueue).items():
                defined = case.compare.get(name, np.s_[:])
                np.testing.assert_array_equal(ours[defined], expected[name][defined], name)
            ran += 1
            break
    assert ran
