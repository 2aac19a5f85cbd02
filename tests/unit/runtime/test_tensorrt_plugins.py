"""One plugin for every op: created, cloned and serialized with the real library's types."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "ops"))
from plugin_cases import emulated_fields, every_case, plugin_of, plugin_ops
from tensorrt_bindings_over_nothing import bindings_reason, load_bindings

from specbuild.builder.backends.cuda.tuning.kernel_case import (
    SMALL_TARGET,
    cases_for,
    kernel_case,
    kernel_ops,
)
from specbuild.builder.backends.tensorrt import library as builder_library
from specbuild.builder.backends.tensorrt import network
from specbuild.builder.backends.tensorrt.plugins import versions
from specbuild.plugins_cuda.onnx_schema import schema_of
from specbuild.plugins_cuda.opspec import TYPE_NAMES, OpSpec
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.gpu import Gpu
from specbuild.runtime.executors.tensorrt import library as runtime_library
from specbuild.runtime.executors.tensorrt import loading, plugin, sessions
from specbuild.runtime.executors.tensorrt.check import LIBRARIES, library_reason
from specbuild.runtime.executors.tensorrt.creators import creatable, register_creators
from specbuild.runtime.executors.tensorrt.plugin import OpPlugin
from specbuild.runtime.executors.tensorrt.plugin_record import (
    CUBINS,
    DESCRIPTION,
    NAMESPACE,
    PluginRecord,
    read_fields,
    wire_shapes,
)

Fields = dict[str, bytes]
BINDINGS = "tensorrt's bindings"
ONNX_NAMES = {"bfloat16": "bfloat16", "float32": "float", "int32": "int32", "uint8": "uint8"}


def no_gpu() -> Gpu:
    raise AssertionError("nothing runs here")


@pytest.fixture(scope="module", params=[*sorted(LIBRARIES), BINDINGS])
def trt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """A library, or the bindings of TensorRT with an empty one."""
    if request.param == BINDINGS:
        reason = bindings_reason()
        if reason is not None:
            pytest.skip(reason)
        return load_bindings(tmp_path_factory.mktemp("bindings"))
    reason = library_reason(request.param)
    if reason is not None:
        pytest.skip(reason)
    from specbuild.runtime.executors.tensorrt.library import load

    try:
        module: ModuleType = load(request.param)
    except SpecbuildError as error:
        pytest.skip(str(error))
    return module


@pytest.fixture(scope="module")
def records() -> dict[str, list[tuple[str, Fields]]]:
    return {op.name: list(every_case(op)) for op in plugin_ops()}


def created(trt: Any, fields: Fields) -> tuple[OpPlugin, PluginRecord]:
    """Return the plugin that the registry's creator makes from fields."""
    record, _ = read_fields(fields)
    register_creators(trt, {record.name: record.plugin_version}, no_gpu)
    creator = trt.get_plugin_registry().get_creator(record.name, record.plugin_version, NAMESPACE)
    assert creator is not None
    assert [field.name for field in creator.field_names] == [DESCRIPTION, CUBINS]
    collection = trt.PluginFieldCollection(
        [
            trt.PluginField(name, np.frombuffer(data, np.int8), trt.PluginFieldType.CHAR)
            for name, data in fields.items()
        ]
    )
    return creator.create_plugin("node", collection, trt.TensorRTPhase.BUILD), record


def described(trt: Any, record: PluginRecord, shapes: Any, *, dynamic: bool) -> list[Any]:
    """Return descriptions of tensors, fixed or with one profile's range, in library types."""
    descriptions = []
    for tensor, shape in zip(record.tensors, shapes, strict=False):
        desc = trt.PluginTensorDesc()
        dtype = {"bfloat16": "BF16", "float32": "FLOAT", "int32": "INT32", "uint8": "INT32"}
        desc.dims = trt.Dims(shape)
        desc.type = getattr(trt.DataType, dtype[tensor.dtype])
        desc.format = trt.TensorFormat.LINEAR
        if dynamic:
            held = trt.DynamicPluginTensorDesc()
            held.desc = desc
            held.min = held.opt = held.max = trt.Dims(shape)
            desc = held
        descriptions.append(desc)
    return descriptions


def test_the_library_has_all_names_that_its_module_uses(trt: Any) -> None:
    """Every name after ``trt.`` and ``library.``. Only TensorRT-RTX lists GPUs."""
    asked = set()
    for module in (network, plugin, sessions, loading, runtime_library, builder_library):
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                holder = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                if holder in ("trt", "_trt", "library", "_library"):
                    asked.add(node.attr)
    assert {"BuilderFlag", "IPluginV3OneBuildV2", "OnnxParser", "Runtime"} <= asked
    allowed = {"ComputeCapability"} if "rtx" not in trt.__name__ else set()
    assert {name for name in asked if not hasattr(trt, name)} <= allowed
    assert {"VERSION_COMPATIBLE", "WEIGHT_STREAMING"} <= set(dir(trt.BuilderFlag))


@pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)
def test_creators_create_every_case_in_the_real_registry(
    trt: Any, records: dict[str, list[tuple[str, Fields]]], op: OpSpec
) -> None:
    assert records[op.name]
    for name, fields in records[op.name]:
        plugin, record = created(trt, fields)
        for capability in ("CORE", "BUILD", "RUNTIME"):
            kind = getattr(trt.PluginCapabilityType, capability)
            assert plugin.get_capability_interface(kind) is plugin
        assert isinstance(plugin, trt.IPluginV3)
        again = plugin.clone()
        assert again is not plugin and again.record is plugin.record
        serialised = {field.name: bytes(field.data) for field in again.get_fields_to_serialize()}
        assert serialised == fields, name
        runtime_plugin, _ = created(trt, serialised)
        assert runtime_plugin.record == record
        assert (runtime_plugin.plugin_name, runtime_plugin.num_outputs) == (
            record.name,
            len(record.outputs),
        )


@pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)
def test_answers_agree_with_the_schema(
    trt: Any,
    records: dict[str, list[tuple[str, Fields]]],
    op: OpSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schema = schema_of(op)
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    formal = {p.name: p for p in (*schema.inputs, *schema.outputs)}
    declared = {t.name: t for t in (*op.inputs, *op.outputs)}
    for name, fields in records[op.name]:
        plugin, record = created(trt, fields)
        bucket = record.buckets[0]
        wire = wire_shapes(record.inputs, bucket.inputs)
        shapes = [*wire, *bucket.outputs]
        descriptions = described(trt, record, shapes, dynamic=True)
        for position, tensor in enumerate(record.tensors):
            spec, parameter = declared[tensor.name], formal[tensor.name]
            types = allowed.get(parameter.type_str, {parameter.type_str})
            assert f"tensor({ONNX_NAMES[tensor.dtype]})" in types, (name, tensor.name)
            assert ONNX_NAMES[tensor.dtype] in TYPE_NAMES[spec.dtype]
            assert plugin.supports_format_combination(position, descriptions, len(record.inputs))
            right = changed(trt, descriptions[position].desc)
            for wrong in (trt.DataType.HALF, trt.DataType.INT8, trt.DataType.BOOL):
                descriptions[position].desc = changed(trt, right, type=wrong)
                assert not plugin.supports_format_combination(position, descriptions, 0)
            descriptions[position].desc = changed(trt, right, format=trt.TensorFormat.CHW32)
            assert not plugin.supports_format_combination(position, descriptions, 0)
            descriptions[position].desc = right
        # Only a network makes TensorRT's expressions of sizes: here they are numbers.
        builder = SimpleNamespace(constant=int)
        with monkeypatch.context() as patched:
            patched.setattr(plugin, "_trt", SimpleNamespace(DimsExprs=tuple))
            found = plugin.get_output_shapes(bucket.inputs, [], builder)
        assert found == list(bucket.outputs), name
        types = [d.desc.type for d in descriptions]
        inputs = len(record.inputs)
        assert plugin.get_output_data_types(types[:inputs]) == types[inputs:]
        assert [plugin.get_aliased_input(i) for i in range(plugin.num_outputs)] == [
            next((i for i, t in enumerate(record.inputs) if (o.name, t.name) in op.aliases), -1)
            for o in record.outputs
        ]
        plugin.configure_plugin(descriptions[:inputs], descriptions[inputs:])
        assert plugin.get_valid_tactics() == []
        assert plugin.get_workspace_size(descriptions[:inputs], []) == record.workspace_bytes
        plugin.on_shape_change(described(trt, record, wire, dynamic=False), [])


def changed(trt: Any, desc: Any, **fields: Any) -> Any:
    """Return a copy of a description with other fields."""
    copy = trt.PluginTensorDesc()
    for name in ("dims", "type", "format", "scale"):
        setattr(copy, name, fields.get(name, getattr(desc, name)))
    return copy


def test_rejects_other_shapes(trt: Any, records: dict[str, list[tuple[str, Fields]]]) -> None:
    plugin, record = created(trt, records["KvWrite"][0][1])
    wrong = [(*shape[:-1], shape[-1] + 1) for shape in record.buckets[0].inputs]
    with pytest.raises(SpecbuildError, match="SpecbuildKvWrite has no launches for inputs of shap"):
        plugin.on_shape_change(described(trt, record, wrong, dynamic=False), [])


def test_tactics_are_the_candidates(trt: Any) -> None:
    op = next(op for op in kernel_ops() if op.name == "RmsQkvRope")
    case = cases_for(op, "decode", gpu=False)[0]
    drawn = kernel_case(op, case)
    assert op.tactics is not None
    candidates = op.tactics(drawn.request("decode", SMALL_TARGET))[:3]
    lowerings = [drawn.lowering("decode", SMALL_TARGET, tactic) for tactic in candidates]
    plugin_op = plugin_of(drawn, "decode", SMALL_TARGET, *lowerings)
    fields = emulated_fields(plugin_op)
    plugin, record = created(trt, fields)
    assert plugin.get_valid_tactics() == []
    shapes = [*wire_shapes(record.inputs, record.buckets[0].inputs), *record.buckets[0].outputs]
    descriptions = described(trt, record, shapes, dynamic=True)
    plugin.configure_plugin(descriptions[: len(record.inputs)], [])
    assert plugin.get_valid_tactics() == list(range(1, len(candidates) + 1))


def test_a_creator_rejects_the_fields_of_another_op(
    trt: Any, records: dict[str, list[tuple[str, Fields]]]
) -> None:
    _, record = created(trt, records["KvWrite"][0][1])
    creator = trt.get_plugin_registry().get_creator(record.name, record.plugin_version, NAMESPACE)
    fields = records["KvCommit"][0][1]
    collection = trt.PluginFieldCollection(
        [
            trt.PluginField(name, np.frombuffer(data, np.int8), trt.PluginFieldType.CHAR)
            for name, data in fields.items()
        ]
    )
    with pytest.raises(SpecbuildError, match=r"asks for SpecbuildKvWrite .* SpecbuildKvCommit"):
        creator.create_plugin("layers.0", collection, trt.TensorRTPhase.RUNTIME)


@pytest.fixture
def library(trt: Any) -> Any:
    if trt.__name__ == "tensorrt_bindings":
        pytest.skip("there is no library under these bindings")
    return trt


def test_a_builder_finds_registered_plugins(library: Any) -> None:
    """The check of a network's ops uses the builder's registry, like the parser."""
    trt = library
    from specbuild.builder.backends.tensorrt.plugins.registration import register_plugins
    from specbuild.runtime.executors.tensorrt.library import new_logger

    register_plugins(trt)
    registry = trt.Builder(new_logger(trt, [])).get_plugin_registry()
    names = {creator.name for creator in registry.all_creators_recursive}
    assert {f"Specbuild{op.name}" for op in kernel_ops()} <= names
    for op in kernel_ops():
        version = f"1.{versions.plugin_version(op)}"
        assert registry.get_creator(f"Specbuild{op.name}", version, NAMESPACE) is not None


def test_no_plugin_is_called_like_an_op_of_the_parser(library: Any) -> None:
    """The parser prefers its own importer to a plugin of the same name."""
    trt = library
    from specbuild.runtime.executors.tensorrt.library import new_logger

    builder = trt.Builder(new_logger(trt, []))
    parser = trt.OnnxParser(builder.create_network(0), new_logger(trt, []))
    assert parser.supports_operator("MatMul")
    assert not [op.name for op in kernel_ops() if parser.supports_operator(f"Specbuild{op.name}")]


def test_an_op_whose_fields_changed_needs_a_new_version() -> None:
    stored = versions.stored_versions()
    assert versions.next_versions(stored) == stored
    op = next(op for op in kernel_ops() if op.attributes and op.aliases)
    assert versions.plugin_version(op) == stored[op.name][0]
    for changed_op in (
        dataclasses.replace(op, attributes=op.attributes[:-1]),
        dataclasses.replace(op, aliases=()),
        dataclasses.replace(op, inputs=(*op.inputs[1:], op.inputs[0])),
        dataclasses.replace(
            op, inputs=(dataclasses.replace(op.inputs[0], optional=True), *op.inputs[1:])
        ),
    ):
        with pytest.raises(AssertionError, match="assign the next"):
            versions.plugin_version(changed_op)
    older = stored | {op.name: (stored[op.name][0], "another")}
    assert versions.next_versions(older)[op.name][0] == stored[op.name][0] + 1


def test_the_runtime_creates_plugins_of_its_format() -> None:
    asked = {"SpecbuildLinear": "1.7", "SpecbuildEmbed": "2.1", "OtherPlugin": "1.1"}
    assert creatable(asked) == {"SpecbuildLinear": "1.7", "SpecbuildEmbed": "1.*"}


def test_the_document_names_the_ops_that_could_be_embedded(
    records: dict[str, list[tuple[str, Fields]]],
) -> None:
    """One launch and no scratch memory, at every size."""

    def alone(fields: Fields) -> bool:
        record, _ = read_fields(fields)
        tactics = [tactic for bucket in record.buckets for tactic in bucket.tactics]
        return all(len(t.launches) == 1 and not t.workspaces for t in tactics)

    found = {name: [alone(fields) for _, fields in cases] for name, cases in records.items()}
    text = (Path(__file__).parents[3] / "docs/developers/tensorrt-plugins.md").read_text("utf-8")
    section = text.partition("## Why no ahead-of-time plugins")[2].partition("\n## ")[0]
    always, sometimes = section.partition("At some sizes")[::2]
    named = [set(re.findall(r"`([A-Z]\w+)`", part)) for part in (always, sometimes)]
    assert all(named)
    assert all(all(found[name]) for name in named[0])
    assert named[1] == {name for name, each in found.items() if any(each)} & named[1]
    assert not any(all(found[name]) for name in named[1])
