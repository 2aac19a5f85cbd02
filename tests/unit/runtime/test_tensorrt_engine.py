"""``build --backend tensorrt`` with a substitute for TensorRT; decoding with its engine."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from fused_graphs import run_graph, sequence
from plugin_engine import HOST, VERSION, Built, HostGpu, NoCompiler, built_by_nobody, executor_of
from toy_engine import run

from specbuild.builder.backends.tensorrt import options as tensorrt_options
from specbuild.builder.backends.tensorrt.plugins import backend as plugin_backend
from specbuild.builder.backends.tensorrt.plugins import engine_files
from specbuild.builder.backends.tensorrt.plugins.backend import refuse_foreign_options
from specbuild.builder.backends.tensorrt.plugins.engine import lower_roles
from specbuild.builder.backends.tensorrt.plugins.engine_files import engine_request
from specbuild.builder.backends.tensorrt.request import EngineRequest, EngineResult
from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, TensorRtOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.device import this_device
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest, verify_files
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.engine_dir.weights_file import open_weights
from specbuild.runtime.errors import SpecbuildError, UnsupportedHereError
from specbuild.runtime.executors.tensorrt import check, loading
from specbuild.runtime.executors.tensorrt.plugin_record import (
    CUBINS,
    DESCRIPTION,
    NAMESPACE,
    read_fields,
)
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

SIZES = {
    "max_seq_len": 64, "max_batch_size": 2, "page_size": 16,
    "draft_top_k": 2, "draft_depth": 3, "draft_tokens": 5,
}  # fmt: skip
TREE = DraftShape(2, 3, 5)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1])


class StandIn(NoCompiler):
    """A compiler for ``lower_plugins`` that compiles nothing."""

    lowered: ClassVar[Any] = None

    def __init__(self, _gpu: str) -> None:
        pass

    @property
    def plugins(self) -> Any:
        return self.lowered.plugins

    def missing(self, kernels: Any) -> tuple[Any, ...]:
        return tuple(kernels)


@dataclass
class Made:
    """An engine directory, and the calls to TensorRT that built it."""

    directory: Path
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    models: dict[str, ir.Model] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        return read_manifest(self.directory)


@pytest.fixture(scope="module")
def made(
    target_path: Path, draft_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Made]:
    found = Made(tmp_path_factory.mktemp("plugins") / "engine")

    def build_engine(request: EngineRequest, progress: Any) -> EngineResult:
        found.requests[request.role] = request
        return built_by_nobody(request, progress)

    def lower(models: dict[str, ir.Model], *rest: Any) -> Any:
        found.models = models
        StandIn.lowered = lower_roles(models, *rest)
        return StandIn.lowered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorrt_options, "require_library", lambda _: None)
        patch.setattr(plugin_backend, "Compiler", StandIn)
        patch.setattr(plugin_backend, "lower_roles", lower)
        patch.setattr(engine_files, "build_engine", build_engine)
        options = BuildOptions.from_flat(
            model=target_path, draft=draft_path, output=found.directory, backend="tensorrt", **SIZES
        )
        build(options, SilentProgress())
    yield found


@pytest.fixture(scope="module")
def built(made: Made) -> Built:
    """The same engine for an executor that runs references."""
    return Built(made.models, made.manifest)


def test_the_directory_is_complete(made: Made) -> None:
    manifest = made.manifest
    verify_files(made.directory, manifest)
    assert manifest.backend == "tensorrt" and manifest.tensorrt is not None
    assert manifest.tensorrt.version == VERSION
    assert manifest.tensorrt.compute_capabilities == ("sm_90",)
    files = {role.file for role in manifest.roles.values()}
    assert {"target.engine", "draft.engine", "draft_fuse.engine"} <= files
    assert {"choose.launches.json", "commit.launches.json"} <= files
    assert files <= set(manifest.files)
    named = {name for role in manifest.roles.values() for name in role.tensors}
    assert named == set(manifest.tensors) == set(open_weights(made.directory, manifest))
    assert "d2t" in manifest.roles["expand"].tensors


def test_nodes_are_plugins_and_weights_are_inputs(made: Made) -> None:
    manifest = made.manifest
    assert manifest.tensorrt is not None
    for role in ("target", "draft_fuse", "draft"):
        model = onnx.load(made.directory / manifest.roles[role].file)
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


def test_profiles_name_every_dynamic_input(made: Made) -> None:
    for role, request in made.requests.items():
        graph = onnx.load(made.directory / f"{role}.engine").graph
        dynamic = {
            value.name
            for value in graph.input
            if any(d.dim_param for d in value.type.tensor_type.shape.dim)
        }
        assert dynamic
        for profile in request.profiles:
            assert {port.name for port in profile} == dynamic
            assert all(port.min_shape == port.opt_shape == port.max_shape for port in profile)
        assert request.aliased_plugins and request.weights is None
        module, _, name = str(request.prepare).partition(":")
        assert callable(getattr(importlib.import_module(module), name))
        assert {domain for domain, _ in request.ops} == {NAMESPACE}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("weight_streaming", "--weight-streaming: its engines have no weights"),
        ("specpv", "--specpv: its profiles have no rows"),
    ],
)
def test_rejects_unsupported_options(
    target_path: Path, tmp_path: Path, option: str, message: str
) -> None:
    options = BuildOptions.from_flat(
        model=target_path, output=tmp_path / "e", backend="tensorrt", **{option: True}
    )
    with pytest.raises(SpecbuildError, match=message):
        refuse_foreign_options(options)


def test_check_reports_missing_requirements_without_loading(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, directory = made.manifest, made.directory
    monkeypatch.setattr(check, "_gpu_reasons", lambda _: [])
    monkeypatch.setattr(check, "installed_version", lambda _: None)
    (reason,) = check.reasons_here(directory, manifest, this_device())
    assert "TensorRT is not installed" in reason and "pip install" in reason
    monkeypatch.setattr(check, "installed_version", lambda _: "10.4.0")
    assert (
        "TensorRT is 10.4.0, 10.16 or later"
        in check.reasons_here(directory, manifest, this_device())[0]
    )
    monkeypatch.setattr(check, "installed_version", lambda _: "10.17.0.2")
    (reason,) = check.reasons_here(directory, manifest, this_device())
    assert "built by TensorRT 10.16.0.1, here is 10.17.0.2" in reason
    monkeypatch.setattr(check, "installed_version", lambda _: VERSION)
    assert check.reasons_here(directory, manifest, this_device()) == []
    assert manifest.tensorrt is not None
    plugins = manifest.tensorrt.plugins | {"FlashAttention": "2", "SpecbuildLinear": "7.1"}
    other = replace(manifest, tensorrt=replace(manifest.tensorrt, plugins=plugins))
    reasons = check.reasons_here(directory, other, this_device())
    assert len(reasons) == 2
    assert "plugin FlashAttention is of version 2, this specbuild has none" in reasons[0]
    assert "plugin SpecbuildLinear is of version 7.1, this specbuild has 1.*" in reasons[1]


def test_weights_lie_on_the_device_under_their_names(made: Made) -> None:
    manifest, gpu = made.manifest, HostGpu()
    gpu.new_event = lambda **_: None  # type: ignore[attr-defined]
    gpu.wait = gpu.record = lambda *_: None  # type: ignore[attr-defined]
    weights = loading.load_weights(gpu, made.directory, manifest, readers=2)  # type: ignore[arg-type]
    tensors = open_weights(made.directory, manifest)
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
        loading.load_weights(small, made.directory, manifest, readers=1)  # type: ignore[arg-type]


def test_the_request_names_absolute_files(made: Made, tmp_path: Path) -> None:
    role = made.manifest.roles["draft"]
    graph = (made.directory / "draft.engine").read_bytes()
    asked = TensorRtOptions(timing_cache=Path("cache.bin"), hardware_compatible=True)
    timed = BuildOptions(Path("m"), Path("o"), backend="tensorrt", tensorrt=asked)
    request = engine_request(role, graph, tmp_path / "g.onnx", tmp_path / "draft.engine", timed)
    assert Path(str(request.timing_cache)).is_absolute()
    assert request.hardware_compatible and not request.version_compatible
    assert request.role == "draft"


@pytest.mark.parametrize(
    "sampled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["greedy", "sampled"]
)
def test_drafts_change_no_token(built: Built, sampled: bool) -> None:
    """Padded to profiles, with pools that stay on the device, replayed from graphs."""
    sampling = SamplingParams(temperature=0.8, top_k=20, seed=5) if sampled else SamplingParams()
    params = GenerateParams(max_new_tokens=6, sampling=sampling)
    results = {}
    for name, speculation in (("none", None), ("chain", DraftShape(1, 2, 2)), ("tree", TREE)):
        executor, gpu, sessions = executor_of(built)
        engine = Engine(built.manifest, executor)
        results[name] = run(engine, PROMPTS, params, speculation=speculation)
        assert gpu.graphs > 0, "profiles that ran twice are recorded"
        assert ("draft" in sessions) == (name != "none")
        executor.close()
        assert gpu.closed and not gpu.held
    assert results["chain"].ids == results["none"].ids
    assert results["tree"].ids == results["none"].ids
    alone = [
        run(Engine(built.manifest, executor_of(built)[0]), [p], params, speculation=None).ids[0]
        for p in PROMPTS
    ]
    assert alone == results["none"].ids


def test_tokens_equal_one_pass_over_the_full_sequence(built: Built) -> None:
    """No pages, steps or padding: the references run all rows at once."""
    executor, _, _ = executor_of(built)
    params = GenerateParams(max_new_tokens=8)
    (tokens,) = run(Engine(built.manifest, executor), PROMPTS[:1], params, speculation=TREE).ids
    ids = [*PROMPTS[0], *tokens]
    model, pages = built.models["target"], 1 + -(-len(ids) // 16)
    feeds = {
        "token_ids": torch.tensor(ids, dtype=torch.int32),
        "positions": torch.arange(len(ids), dtype=torch.int32),
        "row_start": torch.tensor([0, len(ids)], dtype=torch.int32),
        "ancestor_bits": torch.zeros(len(ids), 1, dtype=torch.int32),
        "logit_rows": torch.arange(len(ids), dtype=torch.int32),
    }
    for port in model.graph.inputs:
        _, _, part = str(port.name).rpartition(".")
        if part in ("page_table", "row_slot", "tree_start", "write_slot"):
            feeds[str(port.name)] = sequence(range(len(ids)), 16, pages)[part]
        elif str(port.name) not in feeds:
            shape = [len(ids) if str(getattr(s, "value", s)) == "T" else int(s) for s in port.shape]
            feeds[str(port.name)] = torch.zeros(shape, dtype=torch.bfloat16)
    logits = run_graph(model, feeds)["logits"]
    assert logits.argmax(1)[len(PROMPTS[0]) - 1 : -1].tolist() == tokens


def test_a_profile_is_walked_once_and_recorded_once(built: Built) -> None:
    executor, gpu, sessions = executor_of(built)
    rng = np.random.default_rng(1)
    feeds = {
        "logits": rng.standard_normal((2, built.manifest.target.vocab), np.float32),
        "temperature": np.zeros(2, np.float32),
        "top_k": np.zeros(2, np.int32),
        "top_p": np.ones(2, np.float32),
        "seed": np.arange(2, dtype=np.int32),
        "position": np.arange(2, dtype=np.int32),
    }
    for _ in range(4):
        feeds["logits"] = rng.standard_normal(feeds["logits"].shape, np.float32)
        got = executor.run("choose", feeds)
        np.testing.assert_array_equal(got["choice"], feeds["logits"].argmax(1))
    assert sessions["choose"].queued == 2 and gpu.graphs == 3
    plain, plain_gpu, _ = executor_of(built, recorded=False)
    for _ in range(3):
        np.testing.assert_array_equal(plain.run("choose", feeds)["choice"], got["choice"])
    assert plain_gpu.graphs == 0


def test_rejects_sizes_outside_every_profile(built: Built) -> None:
    executor, _, _ = executor_of(built)
    rows = 1 + max(p.axes["R"].most for p in built.manifest.roles["choose"].profiles)
    feeds = {
        "logits": np.zeros((rows, built.manifest.target.vocab), np.float32),
        **{n: np.zeros(rows, np.float32) for n in ("temperature", "top_p")},
        **{n: np.zeros(rows, np.int32) for n in ("top_k", "seed", "position")},
    }
    with pytest.raises(SpecbuildError, match=f"role choose has no profile for R {rows}"):
        executor.run("choose", feeds)
    feeds["seed"] = feeds["seed"][1:]
    with pytest.raises(SpecbuildError, match="axis R is"):
        executor.run("choose", feeds)
