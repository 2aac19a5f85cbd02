"""``tune``: programs read from a plan, the selection of a tactic, a rewritten engine."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import write_two_layers
from drawn_inputs import as_tensor, drawn_ops
from plan_host import PlanHost, lowered_engine

from specbuild.builder.backends.cuda import engine as cuda_engine
from specbuild.builder.backends.cuda.compile import nvrtc
from specbuild.builder.backends.cuda.compile.nvrtc import Compiler, target_of
from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.plan.plan_reader import ReadPlan, read_programs
from specbuild.builder.backends.cuda.plan.plan_writer import program_bytes
from specbuild.builder.backends.cuda.tactics import measured_code, tactic_book
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering
from specbuild.builder.backends.cuda.tactics.tactic_book import TacticBook
from specbuild.builder.backends.cuda.tactics.tactic_file import (
    read_tactics,
    tactic_file,
    write_tactics,
)
from specbuild.builder.backends.cuda.tuning import tune
from specbuild.builder.backends.cuda.tuning.choice import fastest, measure_all, shapes_of
from specbuild.builder.backends.cuda.tuning.inputs import _RULES, LaunchData, contexts_for
from specbuild.builder.backends.cuda.tuning.prompt_cuts import cuts_of
from specbuild.builder.backends.cuda.tuning.relower import lower_again
from specbuild.builder.backends.cuda.tuning.timer import Candidate, Measurement
from specbuild.builder.backends.cuda.tuning.tune import TuneOptions, TuneReport, tune_engine
from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.options import SynthOptions
from specbuild.builder.synth.synth import write_checkpoints
from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.linear.block_scaled import decoded
from specbuild.plugins_cuda.linear.storage import STORAGES, Storage
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.registry import all_ops, op_named
from specbuild.runtime.engine_dir.files import read_manifest, verify_files
from specbuild.runtime.errors import EngineFileError, SpecbuildError, UnsupportedHereError
from specbuild.runtime.executors.cuda.check import read_plan

GPU = "sm_90a"
SIZES: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 1}
DRAFT: dict[str, Any] = {"draft_top_k": 2, "draft_depth": 1, "draft_tokens": 2}
SILENT = SilentProgress()
_ENTRY = re.compile(r'extern "C" __global__[^(]*\([^)]*\)\s*(\w+)\(')


@pytest.fixture(autouse=True, scope="module")
def nothing_is_shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("shipped")
        empty = {"version": 2, "gpu": GPU, "device": "NVIDIA H200", "kernels": {}, "entries": []}
        (folder / "h200.json").write_text(json.dumps(empty))
        patch.setattr(f"{tactic_book.__name__}.SHIPPED_FOLDER", folder)
        yield


class LikesTheLast:
    """A GPU on which the last candidate of an op is the fastest."""

    device = "NVIDIA H200"

    def __init__(self, compiler: Compiler | None = None) -> None:
        del compiler
        self.asked: list[str] = []

    def close(self) -> None:
        self.asked.append("closed")

    def measure(
        self, op: OpSpec, request: LoweringRequest, candidates: Sequence[Candidate]
    ) -> list[Measurement]:
        self.asked.append(op.name)
        cuts = [len(cut) for cut in cuts_of(op, request)]
        assert all([len(cut) for cut in one.cuts] == cuts for one in candidates)
        return [Measurement((10.0 - i,)) for i in range(len(candidates))]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    write_two_layers(path)
    return path


@pytest.fixture(scope="module")
def lowered(checkpoints: Path) -> LoweredEngine:
    return lowered_engine(checkpoints / "target", checkpoints / "draft", **SIZES, **DRAFT)


@pytest.fixture(scope="module")
def plan(lowered: LoweredEngine) -> ReadPlan:
    return read_back(lowered)


def read_back(lowered: LoweredEngine) -> ReadPlan:
    """Return the engine's programs as read from its files."""
    host = PlanHost(lowered)
    files = {
        entry.file: program_bytes(lowered.writer.program(program))
        for entry, program in lowered.programs
    }
    return read_programs(host.plan, files.__getitem__)


@pytest.fixture(scope="module")
def last_candidates(plan: ReadPlan) -> TacticBook:
    """Return the last candidate for every shape."""
    entries, _ = measured(plan)
    return TacticBook(tactic_file(GPU, "NVIDIA H200", entries), "t.json")


def measured(plan: ReadPlan) -> tuple[list[Any], list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiler, "compile", lambda *_: None)
        patch.setattr(Compiler, "missing", lambda *_: ())
        shapes = shapes_of(plan, target_of(GPU))
        return measure_all(shapes, Compiler(GPU), LikesTheLast(), SILENT, float("inf"))


def test_read_programs_are_written_unchanged(lowered: LoweredEngine, plan: ReadPlan) -> None:
    writer, programs = lower_again(plan, CallLowering(target_of(GPU)))
    assert writer.buffers == lowered.writer.buffers
    assert writer.kernels == lowered.writer.kernels
    assert [entry for entry, _ in programs] == [entry for entry, _ in lowered.programs]
    for (entry, again), (_, first) in zip(programs, lowered.programs, strict=True):
        assert program_bytes(writer.program(again)) == program_bytes(
            lowered.writer.program(first)
        ), entry.name


def test_other_tactics_give_equal_results_by_other_launches(
    lowered: LoweredEngine, plan: ReadPlan, last_candidates: TacticBook
) -> None:
    writer, programs = lower_again(plan, CallLowering(target_of(GPU), last_candidates))
    assert set(writer.kernels) != set(lowered.writer.kernels)
    runs = []
    for engine in (lowered, replace(lowered, writer=writer, programs=programs)):
        host = PlanHost(engine)
        first = host.admit(0, [3, 1, 4, 1, 5, 9, 2, 6], budget=40)
        runs.append((first, [host.step("step@1.draft-2-1-2") for _ in range(4)]))
    assert runs[0] == runs[1]


def test_rejects_a_program_of_another_version(lowered: LoweredEngine) -> None:
    plan = PlanHost(lowered).plan
    entry, program = lowered.programs[0]
    document = json.loads(program_bytes(lowered.writer.program(program)))
    document["ops"][0]["op"] = "Unheard"
    with pytest.raises(EngineFileError, match=r"cannot be lowered again \(.*Unheard"):
        read_programs(plan, lambda _: json.dumps(document).encode())
    del entry


def test_every_tunable_shape_of_an_engine_can_be_drawn(plan: ReadPlan) -> None:
    assert drawn_ops(plan) >= {
        "Linear", "RmsMoe", "RmsQkvRope", "RmsHead", "HeadChoose", "PagedTreeAttention",
        "RmsSwiglu",
    }  # fmt: skip


def test_every_input_of_an_op_with_tactics_can_be_drawn() -> None:
    """``selected`` is an exception: attention to selected tokens has one tactic."""
    names = {spec.name for op in all_ops().values() if op.tactics for spec in op.inputs}
    missing = names - {"selected"} - {*_RULES}
    assert not missing


@pytest.mark.parametrize("geometry", ["tiny-gemma4-moe", "tiny-qwen3-next"])
def test_every_tunable_shape_of_a_family_can_be_drawn(geometry: str, tmp_path: Path) -> None:
    model = SynthModel(SynthOptions(geometry))
    write_checkpoints(model, tmp_path / "model", SILENT, force=False)
    lowered = lowered_engine(tmp_path / "model" / "target", None, **SIZES)
    assert "RmsMoe" in drawn_ops(read_back(lowered))


def test_shapes_of_several_gpus_are_tuned_on_one(checkpoints: Path) -> None:
    """Ops that exchange data use themselves as peers."""
    ranked = lowered_engine(checkpoints / "target", None, **SIZES, tensor_parallel=2)
    assert drawn_ops(read_back(ranked)) >= {"LinearPartial", "RankMoe", "RmsQkvRope"}


@pytest.mark.parametrize("storage", STORAGES, ids=lambda storage: storage.name)
def test_drawn_quantized_weights_have_the_packed_layout(storage: Storage) -> None:
    tiles, blocks = 5, 3
    shape = (tiles, storage.units(blocks), storage.elements)
    infos = {
        "x": TensorInfo((2, 32 * blocks), "bfloat16"),
        "weight": TensorInfo(shape, storage.dtype),
    }
    data = LaunchData(LoweringRequest(infos, {}), 64, np.random.default_rng(3))
    drawn = data.arrays(["weight"])["weight"]
    assert drawn.shape == shape
    values = decoded(as_tensor(drawn, storage.dtype), 32 * blocks).float()
    assert values.shape == (tiles, blocks, 512)
    # Zero points and products of two scales widen the distribution.
    assert 0.5 < values.std().item() * (32 * blocks) ** 0.5 < 2.0


def test_attention_is_measured_at_contexts_within_its_tables() -> None:
    op = op_named("PagedTreeAttention")
    infos = {
        "q": TensorInfo((12, 8, 64), "bfloat16"),
        "k_pool": TensorInfo((5000, 8, 64, 64), "bfloat16"),
        "v_pool": TensorInfo((5000, 8, 64, 64), "bfloat16"),
        "page_table": TensorInfo((3, 1, 256), "int32"),
        "row_start": TensorInfo((4,), "int32"),
        "row_slot": TensorInfo((12,), "int32"),
        "tree_start": TensorInfo((3,), "int32"),
        "ancestor_bits": TensorInfo((12, 1), "int32"),
    }
    request = LoweringRequest(infos, op.complete({"scale": 0.125}))
    assert contexts_for(request, 1024) == (1024, 16384)
    windowed = replace(request, attributes=op.complete({"scale": 0.125, "window": 128}))
    assert contexts_for(windowed, 1024) == (1024,)
    data = LaunchData(request, 16384, np.random.default_rng(0))
    assert data.context_lengths.max() == 16384 - 4 and len(set(data.context_lengths.tolist())) == 3
    arrays = data.arrays(["page_table", "row_slot", "tree_start", "ancestor_bits"])
    np.testing.assert_array_equal(arrays["row_slot"][:4], data.context_lengths[0] + np.arange(4))
    np.testing.assert_array_equal(arrays["ancestor_bits"][4:8, 0], [1, 3, 7, 15])
    used = arrays["page_table"][arrays["page_table"] > 0]
    assert len(set(used.tolist())) == len(used) == data.pages - 1


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([((10.0,), 0), ((9.0,), 0), ((8.0,), 0)], [2, 1]),
        ([((10.0,), 0), ((9.85,), 0)], []),  # within the noise
        ([((10.0,), 0), ((5.0,), 1), ((9.0,), 0)], [2]),  # one different value
        ([((10.0,), 0), ((5.0,), None), ((9.0,), 0)], [2]),  # failed
        ([((10.0, 10.0), 0), ((5.0, 10.5), 0)], []),  # slower at long contexts
        ([((10.0, 10.0), 0), ((9.0, 10.1), 0)], [1]),
        ([((10.0,), 0)], []),
    ],
)
def test_the_default_is_kept_unless_another_is_clearly_faster(
    candidates: list[tuple[tuple[float, ...], int | None]], expected: list[int]
) -> None:
    assert fastest([Measurement(*candidate) for candidate in candidates]) == expected


def fake_cubin(_: Any, source: Any, options: tuple[str, ...]) -> tuple[bytes, str]:
    """Return bytes that represent machine code, and a log with every entry of the source."""
    text = source.path.read_text()
    names = _ENTRY.findall(text)
    assert names, source.name
    log = "".join(f"Compiling entry function '{name}' for\nUsed 32 registers\n" for name in names)
    return repr((source.name, options[:-1])).encode(), log


def fake_code(cubin: bytes, _: str) -> Mapping[str, SimpleNamespace]:
    """Return the bytes as the machine code of every entry."""
    return defaultdict(lambda: SimpleNamespace(digest=cubin.decode()))


@pytest.fixture(scope="module")
def engine(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An engine whose kernels are not really compiled; read only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "_compiled", fake_cubin)
        patch.setattr(measured_code, "machine_code", fake_code)
        patch.setattr(cuda_engine, "check_arguments", lambda *_: None)
        patch.setattr(tune, "check_here", lambda *_, **__: [])
        output = tmp_path_factory.mktemp("engines") / "engine"
        build(build_options(checkpoints, output), SILENT)
        yield output


def build_options(checkpoints: Path, output: Path, **changes: Any) -> BuildOptions:
    model = checkpoints / "target"
    return BuildOptions.from_flat(model=model, output=output, backend="cuda", **SIZES, **changes)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def tuned(engine: Path, **changes: Any) -> tuple[TuneReport, LikesTheLast]:
    timer = LikesTheLast()
    return tune_engine(TuneOptions(engine, **changes), SILENT, lambda _: timer), timer


def test_a_tuned_engine_equals_a_build_with_the_file(
    engine: Path, checkpoints: Path, tmp_path: Path
) -> None:
    """This includes its weights, which equal those of a build with defaults."""
    before = contents(engine)
    shutil.copytree(engine, tmp_path / "engine")
    weights = (tmp_path / "engine" / "weights.safetensors").stat().st_ino
    report, _ = tuned(tmp_path / "engine")
    file = tmp_path / "engine.tactics.json"
    assert report.file == str(file)
    assert len(report.measured) == report.shapes == len(read_tactics(file).entries)
    assert report.left == 0 and any(shape.tactic for shape in report.measured)
    after = contents(tmp_path / "engine")
    assert after["plan.json"] != before["plan.json"]
    assert (tmp_path / "engine" / "weights.safetensors").stat().st_ino == weights
    verify_files(tmp_path / "engine", read_manifest(tmp_path / "engine"))
    tactics = json.loads(after["build_report.json"])["cuda"]["tactics"]
    assert tactics["file"] == file.name and tactics["device"] == "NVIDIA H200"
    assert tactics["tuned_shapes"] == tactics["shapes"] == report.shapes
    build(build_options(checkpoints, tmp_path / "fresh", tactics=file, tuned_only=True), SILENT)
    assert contents(tmp_path / "fresh") == after
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"engine", "engine.tactics.json", "fresh"}


def test_entries_of_the_file_are_not_measured_again(engine: Path, tmp_path: Path) -> None:
    shutil.copytree(engine, tmp_path / "engine")
    path, file = tmp_path / "engine", tmp_path / "t.json"
    report, timer = tuned(path, output=file, ops=("Linear",), max_rows=8)
    assert set(timer.asked) == {"Linear", "closed"}
    assert {shape.rows for shape in report.measured} <= set(range(1, 9))
    first = contents(path)
    report, timer = tuned(path, output=file, ops=("Linear",), max_rows=8)
    assert (timer.asked, report.measured) == (["closed"], ())
    assert contents(path) == first
    _, timer = tuned(path, output=file, ops=("Linear",), max_rows=8, force=True)
    assert len(timer.asked) > 1
    report, timer = tuned(path, output=file, seconds=0.0)
    assert (timer.asked, report.left > 0) == (["closed"], True)
    assert contents(path) == first


def test_only_used_programs_are_tuned(engine: Path, tmp_path: Path) -> None:
    shutil.copytree(engine, tmp_path / "engine")
    path, file = tmp_path / "engine", tmp_path / "t.json"
    programs = read_plan(path, read_manifest(path)).programs
    smallest = min((p for p in programs if p.kind == "step"), key=lambda p: p.rows)
    used = frozenset({smallest.name})
    report, _ = tuned(path, output=file, ops=("Linear",), programs=used)
    assert report.measured
    assert max(shape.rows for shape in report.measured) <= smallest.rows
    with pytest.raises(SpecbuildError, match="no program step@999"):
        tuned(path, output=file, programs=frozenset({"step@999"}))


def test_rejects_engines_that_cannot_be_tuned(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(engine)
    monkeypatch.chdir(engine.parent)
    foreign = tmp_path / "foreign.json"
    write_tactics(foreign, tactic_file(GPU, "NVIDIA H100", []))
    for changes, message in (
        ({"ops": ("Lineal",)}, "--ops Lineal: expected ops with tactics: .*Linear"),
        ({"output": foreign}, "was measured on NVIDIA H100"),
        ({"output": engine / "t.json"}, "is inside the engine"),
        ({"output": Path(engine.name) / "t.json"}, "is inside the engine"),
        ({"output": tmp_path / "none" / "t.json"}, "the folder does not exist"),
    ):
        with pytest.raises(SpecbuildError, match=message):
            tuned(engine, **changes)
    monkeypatch.setattr(tune, "check_here", lambda *_, **__: ["there is no GPU"])
    with pytest.raises(UnsupportedHereError, match="cannot be tuned here: there is no GPU"):
        tune_engine(TuneOptions(engine), SILENT)
    assert contents(engine) == before


def test_tuned_only_builds_nothing_if_a_shape_is_missing(
    engine: Path, checkpoints: Path, tmp_path: Path
) -> None:
    del engine
    empty = tmp_path / "empty.json"
    write_tactics(empty, tactic_file(GPU, "NVIDIA H200", []))
    with pytest.raises(SpecbuildError, match=r"--tuned-only: \d+ shapes have no entry in empty"):
        build(build_options(checkpoints, tmp_path / "e", tactics=empty, tuned_only=True), SILENT)
    with pytest.raises(SpecbuildError, match=r"--output .* would replace"):
        build(build_options(checkpoints, tmp_path, tactics=empty, force=True), SILENT)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.json"]
