"""``build --backend tensorrt-rtx``: engines of NVIDIA's compiler, on a machine without a GPU."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_draft, write_target
from hardware import needs_tensorrt_rtx
from latent_files import write_latents
from plugin_engine import HostGpu
from safetensors import safe_open

from specbuild.builder.backends.tensorrt.build_engine import build_engine
from specbuild.builder.backends.tensorrt.request import EngineRequest, InputShapes
from specbuild.builder.build import build as run_build
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.cli.main import main
from specbuild.runtime.engine_dir.files import read_manifest, verify_files
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.weights_file import open_weights
from specbuild.runtime.errors import EngineFileError, SpecbuildError
from specbuild.runtime.executors.tensorrt.check import check_engines, read_header
from specbuild.runtime.executors.tensorrt.loading import load_weights

pytestmark = needs_tensorrt_rtx
SIZES = {"hidden": 64, "q_heads": 4, "kv_heads": 2, "head_dim": 32}
# The library's names of the types that a manifest names as NumPy does.
DTYPES = {"bf16": "bfloat16", "float": "float32", "int32": "int32"}


def build(folder: Path, name: str, *arguments: str) -> Path:
    model = ["--model", folder / "target", "--output", folder / name]
    options = ["--backend", "tensorrt-rtx", "--max-seq-len", "64", "--max-batch-size", "2"]
    assert main(["build", *map(str, model), *options, *arguments]) == 0
    return folder / name


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer for two GPUs, without a draft."""
    folder = tmp_path_factory.mktemp("rtx")
    write_target(folder / "target", layers=1, **SIZES)
    return build(folder, "engine", "--gpu", "sm_120,sm_89")


def bound_as_the_manifest_says(directory: Path, manifest: Manifest) -> None:
    """Compare the network's bindings and the engine's names with the manifest's ports."""
    report = json.loads((directory / "build_report.json").read_text())["tensorrt"]
    assert set(report) == set(manifest.roles)
    for name, role in manifest.roles.items():
        bindings = report[name]["bindings"]
        assert {b["name"] for b in bindings} >= set(role.tensors)
        bindings = [b for b in bindings if b["name"] not in role.tensors]
        engine_bindings = [
            (b["name"], DTYPES[b["dtype"]], [None if s < 0 else s for s in b["shape"]])
            for b in bindings
        ]
        ports = [
            (p.name, p.dtype, [s if isinstance(s, int) else None for s in p.shape])
            for p in (*role.inputs, *role.outputs)
        ]
        assert [t[:2] for t in engine_bindings] == [p[:2] for p in ports]
        # The library infers some dynamic sizes of a graph, but never other values.
        for (_, _, result), (_, _, declared) in zip(engine_bindings, ports, strict=True):
            assert len(result) == len(declared)
            assert all(d is None or g == d for g, d in zip(result, declared, strict=True))
        serialized = (directory / role.file).read_bytes()
        assert all(b["name"].encode() in serialized for b in bindings)
        assert report[name]["profiles"] == len(role.profiles) > 0
        assert role.layers == report[name]["layers"]


def test_engines_match_the_manifest(engine: Path) -> None:
    manifest = read_manifest(engine)
    verify_files(engine, manifest)
    check_engines(engine, manifest)
    assert manifest.device == "sm_89,sm_120"
    assert manifest.tensorrt is not None
    assert manifest.tensorrt.compute_capabilities == ("sm_89", "sm_120")
    assert sorted(manifest.roles) == ["choose", "target"]
    bound_as_the_manifest_says(engine, manifest)
    target = manifest.roles["target"]
    assert [profile.name for profile in target.profiles] == ["decode", "prefill"]
    # One attention with rotations of Q and K, and two stored weights of experts.
    assert (target.layers["attention_input"], target.layers["rotary_embedding"]) == (1, 2)
    assert target.layers["dequantize"] == 2
    assert not any("specbuild" in op for role in manifest.roles.values() for op in role.ops)


def test_stripped_engines_have_no_weights_but_all_their_names(engine: Path) -> None:
    """The weights are in separate files in the checkpoint's format, and can be loaded."""
    folder = engine.parent
    stripped = build(folder, "stripped", "--gpu", "sm_120", "--strip-weights")
    manifest = read_manifest(stripped)
    check_engines(stripped, manifest)
    bound_as_the_manifest_says(stripped, manifest)
    target = manifest.roles["target"]
    tensors = open_weights(stripped, manifest)
    assert set(target.tensors) == set(tensors) == set(manifest.tensors)
    assert not read_manifest(engine).tensors
    serialized = (stripped / target.file).read_bytes()
    whole = (engine / "target.engine").read_bytes()
    table = np.ascontiguousarray(tensors["model.embed_tokens.weight"]).view(np.uint8)
    # The row is random, so it identifies where the file stores it.
    rows = [row.tobytes() for row in table.reshape(len(table), -1)]
    assert all(row in whole for row in rows) and not any(row in serialized for row in rows)
    # Two values a byte, as in the checkpoint.
    codes = tensors["model.layers.0.mlp.experts.down_proj_blocks.float4e2m1"]
    with safe_open(folder / "target" / "model.safetensors", "np") as file:
        blocks = file.get_tensor("model.layers.0.mlp.experts.down_proj_blocks")
    np.testing.assert_array_equal(codes, blocks.reshape(codes.shape))
    gpu = HostGpu()
    gpu.new_event = lambda **_: None  # type: ignore[attr-defined]
    gpu.wait = gpu.record = lambda *_: None  # type: ignore[attr-defined]
    loaded = load_weights(gpu, stripped, manifest, readers=1)  # type: ignore[arg-type]
    assert set(loaded.addresses) == set(target.tensors)


def test_check_of_a_moved_engine_does_not_load_it(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(engine, moved)
    assert main(["inspect", str(moved)]) == 0
    output = capsys.readouterr().out
    for part in ("tensorrt_rtx", "sm_89, sm_120", "profile prefill", "pools of sliding"):
        assert part in output
    assert main(["check", str(moved)]) == 1
    assert "GPU" in capsys.readouterr().out
    assert main(["run", str(moved), "--prompt", "x"]) == 2
    assert "does not run here" in capsys.readouterr().err


def test_the_header_identifies_an_engine_for_another_gpu(engine: Path, tmp_path: Path) -> None:
    moved = tmp_path / "swapped"
    shutil.copytree(engine, moved)
    serialized = moved / "target.engine"
    data = bytearray(serialized.read_bytes())
    assert read_header(bytes(data[:64]), "header").compute_capabilities == ("sm_89", "sm_120")
    data[32] = 1 << 1
    serialized.write_bytes(data)
    with pytest.raises(EngineFileError, match=r"role target is of version .* for sm_80 with"):
        check_engines(moved, read_manifest(moved))


def request_of(graph: bytes, tmp_path: Path, ops: tuple[tuple[str, str], ...]) -> EngineRequest:
    path = tmp_path / "graph.onnx"
    path.write_bytes(graph)
    shapes = InputShapes("x", (1, 4), (2, 4), (8, 4))
    engine = str(tmp_path / "e.engine")
    profiles = ((shapes,),)
    return EngineRequest("tensorrt-rtx", "e", str(path), None, engine, ops, profiles, ("sm_120",))


def one_node(op: str, domain: str = "") -> bytes:
    from onnx import TensorProto, helper

    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", 4]) for n in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node(op, ["x"], ["y"], domain=domain)], "g", *[[p] for p in ports]
    )
    sets = [helper.make_opsetid("", 23), helper.make_opsetid("specbuild", 1)]
    return helper.make_model(graph, opset_imports=sets, ir_version=11).SerializeToString()


@pytest.mark.parametrize("domain", ["", "specbuild"])
def test_rejects_a_node_that_aborts_the_parser(domain: str, tmp_path: Path) -> None:
    request = request_of(one_node("KvWrite", domain), tmp_path, ((domain, "KvWrite"),))
    with pytest.raises(SpecbuildError, match=r"has no op or plugin (specbuild::)?KvWrite"):
        build_engine(request, SilentProgress())


def test_an_aborted_subprocess_is_reported_as_an_error(tmp_path: Path) -> None:
    """The parser aborts at an unknown node, which this test does not check beforehand."""
    request = request_of(one_node("KvWrite", "specbuild"), tmp_path, (("", "Relu"),))
    with pytest.raises(SpecbuildError, match=r"e.engine exited with|rejects the graph"):
        build_engine(request, SilentProgress())


class Interrupting(SilentProgress):
    """Progress that interrupts the build at its first call."""

    def advance(self, amount: int) -> None:
        del amount
        raise KeyboardInterrupt


def test_an_interrupted_build_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def kept(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", kept)
    with pytest.raises(KeyboardInterrupt):
        build_engine(_relu(tmp_path, "sm_120"), Interrupting())
    assert [process.poll() is None for process in started] == [False]


@pytest.mark.slow
@pytest.mark.parametrize("stripped", [(), ("--strip-weights",)], ids=["whole", "stripped"])
def test_every_role_with_a_draft(tmp_path: Path, stripped: tuple[str, ...]) -> None:
    write_target(tmp_path / "target", layers=4, **SIZES)
    write_latents(tmp_path / "target", {1: 12, 2: 20}, kv_width=64)
    write_draft(tmp_path / "draft", target_layers=4, target_hidden=64, inner=64, **SIZES)
    tree = ["--draft-top-k", "2", "--draft-depth", "3", "--draft-tokens", "6"]
    engine = build(tmp_path, "engine", "--draft", str(tmp_path / "draft"), *tree, *stripped)
    manifest = read_manifest(engine)
    check_engines(engine, manifest)
    bound_as_the_manifest_says(engine, manifest)
    assert len(manifest.roles) == 8
    named = {name for role in manifest.roles.values() for name in role.tensors}
    assert named == set(manifest.tensors) and bool(named) == bool(stripped)
    groups = {group.name for group in manifest.cache_groups}
    assert groups == {"full", "sliding", "latent", "latent_sliding", "draft"}


@pytest.mark.slow
def test_the_example_builds(tmp_path: Path) -> None:
    example = Path(__file__).parents[4] / "examples" / "tiny-gpt-oss"
    (tmp_path / "target").symlink_to(example / "target")
    engine = build(tmp_path, "engine", "--draft", str(example / "draft"))
    manifest = read_manifest(engine)
    check_engines(engine, manifest)
    bound_as_the_manifest_says(engine, manifest)
    assert manifest.roles["target"].layers["attention_input"] == 24


@pytest.mark.parametrize("gpu", ["sm_75", "sm_90", "sm_80,sm_86,sm_89,sm_120,sm_121"])
def test_headers_identify_every_gpu(gpu: str, tmp_path: Path) -> None:
    """Check header fields that no other test covers; engines of one node build quickly."""
    if gpu == "sm_90":
        with pytest.raises(SpecbuildError, match="sm_90"):
            build_engine(_relu(tmp_path, gpu), SilentProgress())
        return
    result = build_engine(_relu(tmp_path, gpu), SilentProgress())
    header = read_header((tmp_path / "e.engine").read_bytes()[:64], "header")
    assert header.compute_capabilities == tuple(gpu.split(","))
    assert (header.version, header.engine_bytes) == (result.version, result.engine_bytes)


def _relu(tmp_path: Path, gpu: str) -> EngineRequest:
    from dataclasses import replace

    request = request_of(one_node("Relu"), tmp_path, (("", "Relu"),))
    return replace(request, compute_capabilities=tuple(gpu.split(",")))


class Notes(SilentProgress):
    """Progress that stores the notes of a build."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def note(self, message: str) -> None:
        self.messages.append(message)


@pytest.mark.slow
def test_memory_of_a_build_with_the_sizes_of_20b(tmp_path: Path) -> None:
    """The library holds the complete engine and its compiler; the builder's own memory is small."""
    arguments = ["--geometry", "gpt-oss-20b", "--layers", "1", "--output", str(tmp_path)]
    assert main(["synth", *arguments, "--force"]) == 0
    notes = Notes()
    options = BuildOptions(
        model=tmp_path / "target",
        output=tmp_path / "engine",
        backend="tensorrt-rtx",
        limits=LimitOptions(max_batch_size=1),
    )
    report = run_build(options, notes)
    [memory_note] = [note for note in notes.messages if note.startswith("target.engine:")]
    held, before = (int(n) * 1e6 for n in re.findall(r"(\d+) MB of", memory_note))
    size = report.tensorrt["target"].engine_bytes
    # Experts have four bits a weight and a scale byte for each 32; the others are bf16.
    assert report.weight_bytes < size < 1.05 * report.weight_bytes
    assert before < 200e6
    assert held < size + 1.5e9
    manifest = read_manifest(tmp_path / "engine")
    check_engines(tmp_path / "engine", manifest)
    bound_as_the_manifest_says(tmp_path / "engine", manifest)
