"""A graph agrees with its manifest, and reads no file that the manifest does not list."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from engine_directory import VOCAB, ops_of, write_engine, write_manifest
from onnx import AttributeProto, TensorProto, helper
from toy_engine import prompt

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.features import stored_json
from specbuild.runtime.engine_dir.files import file_entry, read_manifest
from specbuild.runtime.engine_dir.weights_file import open_weights
from specbuild.runtime.errors import EngineFileError
from specbuild.runtime.executors.cpu.executor import CpuExecutor, session_options
from specbuild.runtime.request import GenerateParams

CHOOSE, TARGET = "graphs/choose.onnx", "graphs/target.onnx"


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    write_engine(tmp_path / "engine")
    return tmp_path / "engine"


def generate(path: Path) -> None:
    loaded = Engine.load(path)
    list(loaded.generate([prompt([1, 2, 3])], GenerateParams(max_new_tokens=3)))


def change_graph(engine: Path, name: str, change: Callable[[onnx.ModelProto], object]) -> None:
    """Replace a graph; the manifest has its checksums."""
    model = onnx.load(engine / name, load_external_data=False)
    change(model)
    replace_file(engine, name, model.SerializeToString())


def replace_file(engine: Path, name: str, data: bytes) -> None:
    described = read_manifest(engine)
    (engine / name).write_bytes(data)
    files = {**described.files, name: file_entry(engine / name, chunked=False)}
    write_manifest(engine, dataclasses.replace(described, files=files))


def outside(name: str = "x", location: str = "/etc/hostname", count: int = 1) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.UINT8, dims=[count])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def with_initializer(location: str) -> Callable[[onnx.ModelProto], object]:
    return lambda model: model.graph.initializer.append(outside(location=location))


def in_attribute(model: onnx.ModelProto) -> None:
    node = helper.make_node("Constant", [], ["x"])
    node.attribute.append(AttributeProto(name="value", type=AttributeProto.TENSOR, t=outside()))
    model.graph.node.insert(0, node)


def in_branch(model: onnx.ModelProto) -> None:
    branch = helper.make_graph([], "b", [], [], [outside()])
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    model.graph.node.append(node)


def in_function(model: onnx.ModelProto) -> None:
    function = model.functions.add(name="f", domain="d")
    node = function.node.add(op_type="Constant")
    node.attribute.append(AttributeProto(name="value", type=AttributeProto.TENSOR, t=outside()))


def in_sparse(model: onnx.ModelProto) -> None:
    model.graph.sparse_initializer.add(values=outside(), indices=outside("i"), dims=[4])


PLACES = {
    "relative": with_initializer("hostname"),
    "absolute": with_initializer("/etc/hostname"),
    "up": with_initializer("../../../etc/hostname"),
    "memory": with_initializer("*/_ORT_MEM_ADDR_/*"),
    "weights, but not listed": with_initializer("weights.safetensors"),
    "attribute": in_attribute,
    "branch": in_branch,
    "function": in_function,
    "sparse": in_sparse,
}


@pytest.mark.parametrize("place", PLACES)
def test_rejects_external_data_before_a_session_is_created(
    engine: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_graph(engine, CHOOSE, PLACES[place])
    described = read_manifest(engine)
    role = dataclasses.replace(described.roles["choose"], ops=ops_of(engine / CHOOSE))
    roles = {**described.roles, "choose": role}
    write_manifest(engine, dataclasses.replace(described, roles=roles))
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    with pytest.raises(EngineFileError, match=r"choose\.onnx: it reads tensor 'x' from file"):
        Engine.load(engine)


def test_a_listed_tensor_lies_in_the_weights(engine: Path) -> None:
    def elsewhere(model: onnx.ModelProto) -> None:
        model.graph.initializer[-1].external_data[0].value = "/etc/hostname"

    change_graph(engine, TARGET, elsewhere)
    with pytest.raises(EngineFileError, match="reads tensor 'head' from file '/etc/hostname'"):
        Engine.load(engine)


def renamed(kind: str) -> Callable[[onnx.ModelProto], object]:
    def change(model: onnx.ModelProto) -> None:
        getattr(model.graph, kind)[0].name = "other"

    return change


def retyped(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64


def reshaped(model: onnx.ModelProto) -> None:
    model.graph.input[-1].type.tensor_type.shape.dim[1].dim_value = 21


def unshaped(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.ClearField("shape")


def embedding(**values: object) -> Callable[[onnx.ModelProto], object]:
    def change(model: onnx.ModelProto) -> None:
        tensor = next(t for t in model.graph.initializer if t.name == "embedding")
        for name, value in values.items():
            if name == "dims":
                tensor.dims[:] = value
            else:
                setattr(tensor, name, value)

    return change


def more_ops(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Identity", ["x"], ["z"]))


def named_as_an_input(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(helper.make_tensor("token_ids", TensorProto.INT32, [1], [1]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (renamed("input"), "it has other inputs than the manifest says"),
        (renamed("output"), "it has other outputs than the manifest says"),
        (retyped, r"output logits is int64 \['R', 29\], the manifest says float32"),
        (reshaped, r"full.0.v_pool is float32 \[1, 21, 4, 4\], the manifest says float32 \[1, 20"),
        (unshaped, "output logits is float32 None, the manifest says"),
        (embedding(dims=[28, 4]), r"tensor embedding is float32 \[28, 4\], the manifest says F32"),
        (embedding(data_type=TensorProto.DOUBLE), "tensor embedding is float64"),
        (embedding(name="unused.scale"), "reads tensor 'unused.scale'"),
        (more_ops, "it has other ops than the manifest says: Identity"),
        (named_as_an_input, "share a name"),
        (lambda m: m.graph.initializer.pop(), r"it has no tensors \['head'\]"),
        (lambda m: m.ClearField("graph"), "it has no graph"),
    ],
)
def test_rejects_a_graph_that_differs_from_its_manifest(
    engine: Path, change: Callable[[onnx.ModelProto], object], said: str
) -> None:
    change_graph(engine, TARGET, change)
    with pytest.raises(EngineFileError, match=rf"target\.onnx: .*{said}"):
        Engine.load(engine)


def test_rejects_a_graph_that_is_too_large(engine: Path) -> None:
    replace_file(engine, CHOOSE, b"\0" * ((16 << 20) + 1))
    with pytest.raises(EngineFileError, match="no graph has over 16777216"):
        Engine.load(engine)


def test_rejects_a_port_without_a_source(engine: Path) -> None:
    def ask(model: onnx.ModelProto) -> None:
        model.graph.input.append(helper.make_tensor_value_info("seconds", 1, ["R"]))

    change_graph(engine, CHOOSE, ask)
    data = stored_json(read_manifest(engine))
    asked = {"name": "seconds", "dtype": "float32", "shape": ["R"]}
    data["roles"]["choose"]["inputs"].append(asked)
    write_manifest(engine, json.dumps(data).encode())
    with pytest.raises(EngineFileError, match="role choose has no use for seconds"):
        Engine.load(engine)


@pytest.mark.parametrize("name", ["choice", "logprob"])
def test_an_output_that_is_read_must_be_there(engine: Path, name: str) -> None:
    data = stored_json(read_manifest(engine))
    outputs = data["roles"]["choose"]["outputs"]
    data["roles"]["choose"]["outputs"] = [port for port in outputs if port["name"] != name]
    write_manifest(engine, json.dumps(data).encode())
    with pytest.raises(EngineFileError, match=f"role choose has no {name}"):
        Engine.load(engine)


def test_reports_an_error_of_a_graph_in_one_line(engine: Path) -> None:
    """Rows are written after the pool's only head."""

    def of_another_head(model: onnx.ModelProto) -> None:
        zero = next(t for t in model.graph.initializer if t.name == "zero")
        zero.CopyFrom(helper.make_tensor("zero", TensorProto.INT32, [], [1]))

    change_graph(engine, TARGET, of_another_head)
    with pytest.raises(
        EngineFileError, match=r"target\.onnx: ONNX Runtime .* fails to run"
    ) as said:
        generate(engine)
    assert "\n" not in str(said.value)


def test_rejects_the_native_format_of_the_library(engine: Path, tmp_path: Path) -> None:
    options = session_options(1)
    options.optimized_model_filepath = str(tmp_path / "choose.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(
        (engine / CHOOSE).read_bytes(), options, providers=["CPUExecutionProvider"]
    )
    data = (tmp_path / "choose.ort").read_bytes()
    assert data[4:8] == b"ORTM"
    described = read_manifest(engine)
    executor = CpuExecutor(described, {CHOOSE: data}, open_weights(engine, described))
    with pytest.raises(EngineFileError, match="refuses it"):
        executor.run("choose", {"logits": np.ones((1, VOCAB), np.float32)})


def test_messages_of_the_library_are_not_printed(
    engine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def renamed_input(model: onnx.ModelProto) -> None:
        model.graph.node[-1].input[0] = "other"

    change_graph(engine, CHOOSE, renamed_input)
    data = (engine / CHOOSE).read_bytes().replace(b"other", b"\xff\xfeher")
    replace_file(engine, CHOOSE, data)
    with pytest.raises(EngineFileError, match=r"choose\.onnx: ONNX Runtime .* refuses it"):
        generate(engine)
    assert capfd.readouterr().out == ""


def test_rejects_a_window_that_no_layer_has(engine: Path) -> None:
    """The host would release pages outside the window, and the tokens would be wrong."""
    described = read_manifest(engine)
    groups = tuple(dataclasses.replace(g, window=6) for g in described.cache_groups)
    write_manifest(engine, dataclasses.replace(described, cache_groups=groups))
    with pytest.raises(EngineFileError, match="cache group full has window 6, its layers have 0"):
        Engine.load(engine)


def test_rejects_an_output_with_another_number_of_axes(engine: Path) -> None:
    """The library does not always know the number of axes of an output in advance."""
    described = read_manifest(engine)
    role = described.roles["choose"]
    ports = tuple(dataclasses.replace(port, shape=("R", "S")) for port in role.outputs)
    roles = {**described.roles, "choose": dataclasses.replace(role, outputs=ports)}
    graphs = {CHOOSE: (engine / CHOOSE).read_bytes()}
    executor = CpuExecutor(dataclasses.replace(described, roles=roles), graphs, {})
    with pytest.raises(EngineFileError, match="output choice has 1 axes, the manifest says 2"):
        executor.run("choose", {"logits": np.zeros((3, VOCAB), np.float32)})
