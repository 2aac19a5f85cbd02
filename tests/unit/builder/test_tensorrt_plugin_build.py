"""``build --backend tensorrt`` up to TensorRT, which a stand-in is; and what loads its engines."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from plugin_engine import HOST, VERSION, HostGpu, NoCompiler, Stream, built_by_nobody

from specbuild.builder.backends.tensorrt import capabilities, plugin_plans, plugin_target
from specbuild.builder.backends.tensorrt.plugin_plans import engine_request
from specbuild.builder.backends.tensorrt.request import EngineRequest, EngineResult
from specbuild.builder.build import build
from specbuild.builder.config import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine_file import open_weights, read_manifest, verify_files
from specbuild.runtime.errors import EngineFileError, SpecbuildError, UnsupportedHereError
from specbuild.runtime.executors.tensorrt import engine_check, library, loading
from specbuild.runtime.executors.tensorrt.plugin_record import (
    CUBINS,
    DESCRIPTION,
    NAMESPACE,
    read_fields,
)
from specbuild.runtime.executors.tensorrt.sessions import EngineSession
from specbuild.runtime.manifest import Manifest

SIZES = {
    "max_seq_len": 64, "max_batch_size": 2, "page_size": 16,
    "draft_top_k": 1, "draft_depth": 2, "draft_tokens": 2,
}  # fmt: skip


class StandIn(NoCompiler):
    """A compiler for ``lower_plugins`` that compiles nothing."""

    def __init__(self, _gpu: str) -> None:
        pass

    def missing(self, kernels: Any) -> tuple[Any, ...]:
        return tuple(kernels)


@dataclass
class Made:
    """An engine directory and what was asked of TensorRT for it."""

    directory: Path
    requests: dict[str, EngineRequest] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        return read_manifest(self.directory)


@pytest.fixture(scope="module")
def built(
    target_path: Path, draft_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Made]:
    made = Made(tmp_path_factory.mktemp("plugins") / "engine")

    def build_engine(request: EngineRequest, progress: Any) -> EngineResult:
        made.requests[request.role] = request
        return built_by_nobody(request, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capabilities, "require_library", lambda _: None)
        patch.setattr(plugin_target, "Compiler", StandIn)
        patch.setattr(plugin_target, "check_arguments", lambda *_: None)
        patch.setattr(plugin_plans, "build_engine", build_engine)
        options = BuildOptions(
            model=target_path, draft=draft_path, output=made.directory, backend="tensorrt", **SIZES
        )
        build(options, SilentProgress())
    yield made


def test_the_directory_is_whole(built: Made) -> None:
    manifest = built.manifest
    verify_files(built.directory, manifest)
    assert manifest.backend == "tensorrt" and manifest.tensorrt is not None
    assert manifest.tensorrt.version == VERSION
    assert manifest.tensorrt.compute_capabilities == ("sm_90",)
    files = {role.file for role in manifest.roles.values()}
    assert {"target.engine", "draft.engine", "draft_fuse.engine"} <= files
    assert {"choose.launches.json", "commit.launches.json"} <= files
    assert files <= set(manifest.files)
    named = {name for role in manifest.roles.values() for name in role.tensors}
    assert named == set(manifest.tensors) == set(open_weights(built.directory, manifest))
    assert "d2t" in manifest.roles["expand"].tensors


def test_nodes_are_plugins_and_weights_are_inputs(built: Made) -> None:
    manifest = built.manifest
    assert manifest.tensorrt is not None
    for role in ("target", "draft_fuse", "draft"):
        model = onnx.load(built.directory / manifest.roles[role].file)
        assert not model.functions and not model.graph.initializer
        assert {entry.domain for entry in model.opset_import} == {"", NAMESPACE}
        described = manifest.roles[role]
        ports = [port.name for port in described.inputs]
        inputs = [value.name for value in model.graph.input]
        assert inputs[: len(ports)] == ports
        assert sorted(inputs[len(ports) :]) == sorted(described.tensors)
        for node in model.graph.node:
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            record, cubins = read_fields({n: attributes[n] for n in (DESCRIPTION, CUBINS)})
            assert node.op_type == record.name and node.domain == NAMESPACE
            assert attributes["plugin_version"].decode() == record.plugin_version
            assert manifest.tensorrt.plugins[record.name] == record.plugin_version
            assert len(node.input) == len(record.inputs) and all(node.input)
            assert len(node.output) == len(record.outputs)
            assert len(record.buckets) == len(described.profiles)
            assert cubins


def test_profiles_name_every_dynamic_input(built: Made) -> None:
    for role, request in built.requests.items():
        graph = onnx.load(built.directory / f"{role}.engine").graph
        dynamic = {
            value.name
            for value in graph.input
            if any(d.dim_param for d in value.type.tensor_type.shape.dim)
        }
        assert dynamic
        for profile in request.profiles:
            assert {port.name for port in profile} == dynamic
            assert all(port.least == port.usual == port.most for port in profile)
        assert request.aliased_plugins and request.weights is None
        module, _, name = str(request.prepare).partition(":")
        assert module == plugin_plans.__name__ and callable(getattr(plugin_plans, name))
        assert {domain for domain, _ in request.ops} == {NAMESPACE}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("weight_streaming", "--weight-streaming: its engines hold no weights"),
        ("enable_specpv", "--specpv: no profile has the rows"),
    ],
)
def test_options_without_a_form_are_refused(
    target_path: Path, tmp_path: Path, option: str, message: str
) -> None:
    options = BuildOptions(model=target_path, output=tmp_path / "e", backend="tensorrt")
    with pytest.raises(SpecbuildError, match=message):
        plugin_target._require_options(replace(options, **{option: True}))


def test_check_says_what_lacks_without_loading(
    built: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, directory = built.manifest, built.directory
    monkeypatch.setattr(engine_check, "_gpu_reasons", lambda _: [])
    monkeypatch.setattr(engine_check, "installed_version", lambda _: None)
    (reason,) = loading.reasons_against(directory, manifest)
    assert "TensorRT is not installed" in reason and "pip install" in reason
    monkeypatch.setattr(engine_check, "installed_version", lambda _: "10.4.0")
    assert "TensorRT is 10.4.0, 10.16 or later" in loading.reasons_against(directory, manifest)[0]
    monkeypatch.setattr(engine_check, "installed_version", lambda _: "10.17.0.2")
    (reason,) = loading.reasons_against(directory, manifest)
    assert "built by TensorRT 10.16.0.1, here is 10.17.0.2" in reason
    monkeypatch.setattr(engine_check, "installed_version", lambda _: VERSION)
    assert loading.reasons_against(directory, manifest) == []
    assert manifest.tensorrt is not None
    plugins = manifest.tensorrt.plugins | {"FlashAttention": "2", "SpecbuildLinear": "7.1"}
    other = replace(manifest, tensorrt=replace(manifest.tensorrt, plugins=plugins))
    reasons = loading.reasons_against(directory, other)
    assert len(reasons) == 2
    assert "plugin FlashAttention is of version 2, this specbuild has none" in reasons[0]
    assert "plugin SpecbuildLinear is of version 7.1, this specbuild has 1.*" in reasons[1]


def test_a_missing_or_broken_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library_reason", lambda _: "TensorRT is not installed; x")
    with pytest.raises(UnsupportedHereError, match="TensorRT is not installed"):
        library.load("tensorrt")
    monkeypatch.setattr(library, "library_reason", lambda _: None)

    def broken(_name: str) -> Any:
        raise OSError("libnvinfer.so.10: cannot open shared object file")

    monkeypatch.setattr(library.importlib, "import_module", broken)
    with pytest.raises(UnsupportedHereError, match=r"cannot be loaded \(libnvinfer"):
        library.load("tensorrt")


def test_weights_lie_on_the_device_under_their_names(built: Made) -> None:
    manifest, gpu = built.manifest, HostGpu()
    gpu.new_event = lambda **_: None  # type: ignore[attr-defined]
    gpu.wait = gpu.record = lambda *_: None  # type: ignore[attr-defined]
    weights = loading.load_weights(gpu, built.directory, manifest, readers=2)  # type: ignore[arg-type]
    tensors = open_weights(built.directory, manifest)
    assert set(weights.addresses) == set(tensors)
    (block,) = (m for m in gpu.held.values() if m.ctypes.data == min(weights.addresses.values()))
    for name, array in tensors.items():
        place = weights.addresses[name] - block.ctypes.data
        assert place % 512 == 0
        stored = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        np.testing.assert_array_equal(block[place : place + stored.size], stored)
    weights.release()
    assert not gpu.held
    small = HostGpu(facts=replace(HOST, total_bytes=1 << 20))
    with pytest.raises(UnsupportedHereError, match=r"the weights take .* GiB of device memory"):
        loading.load_weights(small, built.directory, manifest, readers=1)  # type: ignore[arg-type]


@dataclass
class Context:
    """An execution context that remembers what it was told."""

    told: list[tuple[Any, ...]]
    refuses: str = ""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> bool:
            self.told.append((name, *arguments))
            return name != self.refuses

        return call


class Engine:
    """A deserialised engine of one dynamic input, one weight and one output."""

    device_memory_size_v2 = 4096
    num_io_tensors = 3

    def __init__(self, refuses: str = "", on_host: str = "") -> None:
        self.on_host = on_host
        self.told: list[tuple[Any, ...]] = []
        self.refuses = refuses

    def get_tensor_name(self, index: int) -> str:
        return ("token_ids", "weight", "logits")[index]

    def get_tensor_mode(self, name: str) -> str:
        return "output" if name == "logits" else "input"

    def get_tensor_location(self, name: str) -> str:
        return "host" if name == self.on_host else "device"

    def create_execution_context(self, strategy: str) -> Context:
        self.told.append(("create", strategy))
        return Context(self.told, self.refuses)


LIBRARY = SimpleNamespace(
    TensorIOMode=SimpleNamespace(INPUT="input"),
    TensorLocation=SimpleNamespace(HOST="host"),
    ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user managed"),
)


class NumberedStream(Stream):
    """A stream that has a handle, as TensorRT wants it."""

    def __int__(self) -> int:
        return 77


def test_an_engine_has_a_context_for_each_profile() -> None:
    gpu, engine = HostGpu(), Engine()
    session = EngineSession(LIBRARY, gpu, engine, "target", [])  # type: ignore[arg-type]
    addresses = {"token_ids": 1, "weight": 2, "logits": 3}
    for profile in (2, 2, 0):
        session.queue(profile, {"token_ids": (4,)}, addresses, NumberedStream(), scalars={})
    (scratch,) = gpu.held
    once = [
        ("set_input_shape", "token_ids", (4,)),
        ("set_tensor_address", "token_ids", 1),
        ("set_tensor_address", "weight", 2),
        ("set_tensor_address", "logits", 3),
        ("execute_async_v3", 77),
    ]
    made = [("create", "user managed")]
    memory = [("set_device_memory", scratch, 4096)]
    assert engine.told == [
        *made, ("set_optimization_profile_async", 2, 77), *memory, *once, *once,
        *made, ("set_optimization_profile_async", 0, 77), *memory, *once,
    ]  # fmt: skip
    session.close()
    assert not gpu.held


def test_a_value_that_shapes_follow_from_is_read_on_the_host() -> None:
    engine = Engine(on_host="token_ids")
    session = EngineSession(LIBRARY, HostGpu(), engine, "expand", [])  # type: ignore[arg-type]
    addresses = {"token_ids": 1, "weight": 2, "logits": 3}
    for value in (5, 7):
        session.queue(0, {}, addresses, NumberedStream(), scalars={"token_ids": value})
        place = [told[2] for told in engine.told if told[:2] == ("set_tensor_address", "token_ids")]
        assert ctypes.c_int32.from_address(place[-1]).value == value


@pytest.mark.parametrize(
    "refused", ["set_input_shape", "execute_async_v3", "set_optimization_profile_async"]
)
def test_what_tensorrt_refuses_is_said(refused: str) -> None:
    session = EngineSession(
        LIBRARY,
        HostGpu(),
        Engine(refused),
        "draft",
        ["Error Code 4:\n shape"],  # type: ignore[arg-type]
    )
    addresses = {"token_ids": 1, "weight": 2, "logits": 3}
    with pytest.raises(UnsupportedHereError, match=r"of role draft \(Error Code 4: shape\)"):
        session.queue(0, {"token_ids": (4,)}, addresses, NumberedStream(), scalars={})


def test_a_tensor_that_nobody_knows_is_refused() -> None:
    session = EngineSession(LIBRARY, HostGpu(), Engine(), "draft", [])  # type: ignore[arg-type]
    with pytest.raises(EngineFileError, match="role draft has a tensor weight"):
        session.queue(0, {}, {"token_ids": 1, "logits": 3}, NumberedStream(), scalars={})


def test_the_request_names_absolute_files(built: Made, tmp_path: Path) -> None:
    role, options = built.manifest.roles["draft"], BuildOptions(Path("m"), Path("o"))
    graph = (built.directory / "draft.engine").read_bytes()
    timed = replace(options, backend="tensorrt", timing_cache=Path("cache.bin"))
    request = engine_request(role, graph, tmp_path / "g.onnx", tmp_path / "draft.engine", timed)
    assert Path(str(request.timing_cache)).is_absolute()
    assert request.role == "draft"
