"""CUDA engine directories: loading, refusals before loading, and the names of damaged files."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
from engine_directory import write_manifest, write_weights
from fake_gpu import HOPPER, FakeGpu
from toy_device import ToyDevice
from toy_engine import run
from toy_model import D2T, decode_plainly
from toy_plan import SHAPES, kernels_manifest, plan_file, toy_plan

from specbuild.cli.main import main
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import file_entry, read_manifest
from specbuild.runtime.engine_dir.manifest import Manifest, StoredTensor
from specbuild.runtime.engine_dir.plan import Buffer
from specbuild.runtime.engine_dir.strict_json import to_json
from specbuild.runtime.errors import EngineFileError, OutdatedEngineError, UnsupportedHereError
from specbuild.runtime.executors.cuda import check, driver, loading
from specbuild.runtime.executors.cuda.check import gpu_reasons
from specbuild.runtime.executors.cuda.gpu import GpuFacts
from specbuild.runtime.executors.registry import check_here
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.settings import RuntimeSettings

RANDOM = np.random.default_rng(6)


def write_cuda_engine(path: Path) -> Manifest:
    """Write the toy's CUDA engine. Its weights file has a tensor that no plan uses."""
    manifest = kernels_manifest()
    plan = toy_plan(manifest, SHAPES[:1])
    path.mkdir()
    names = [entry.file for entry in plan.programs] + [k.cubin for k in plan.kernels]
    for name in names:
        (path / name).write_bytes(plan_file(plan, name))
    (path / "plan.json").write_text(json.dumps(to_json(plan)))
    arrays = {"unused": RANDOM.standard_normal(5).astype(np.float32), "d2t": D2T.view(np.float32)}
    write_weights(path / "weights.safetensors", arrays)
    names = [*names, "plan.json", "weights.safetensors"]
    manifest = dataclasses.replace(
        manifest,
        tensors={n: StoredTensor("F32", a.shape, (n,)) for n, a in arrays.items()},
        files={n: file_entry(path / n, chunked=n == "weights.safetensors") for n in names},
    )
    write_manifest(path, manifest)
    return manifest


class LoadedToy(ToyDevice):
    """A toy device whose weights come from the engine's own file."""

    def open(self) -> FakeGpu:
        return self.gpu


def load(path: Path, facts: GpuFacts = HOPPER) -> tuple[Engine, LoadedToy]:
    manifest = read_manifest(path)
    device = LoadedToy(manifest, toy_plan(manifest, SHAPES[:1]))
    device.gpu.facts = facts
    executor = loading.open_executor(path, manifest, readers=2, open_device=device.open)
    device._addresses = executor.runner._addresses
    return Engine(manifest, executor), device


def test_an_engine_directory_loads_and_decodes(tmp_path: Path) -> None:
    write_cuda_engine(tmp_path / "engine")
    engine, device = load(tmp_path / "engine")
    params = GenerateParams(max_new_tokens=12)
    result = run(engine, [[1, 2], [7]], params, speculation=SHAPES[0])
    assert result.ids == [decode_plainly(p, 12, params.sampling) for p in ([1, 2], [7])]
    # Only programs that ran were read.
    loaded = [line for line in device.gpu.log if line.startswith("load")]
    assert loaded == [f"load {name}.cubin" for name in dict.fromkeys(device.started)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capability": (8, 9)}, r"built for sm_90a, this GPU \(Fake H200\) is sm_89; build"),
        ({"capability": (10, 0)}, "is sm_100; build"),
        ({"multiprocessors": 66}, "132 multiprocessors, .* has 66"),
        ({"driver_version": 12080}, "driver is for CUDA 12.8, 13.0 or later"),
        ({"total_bytes": 200 << 20}, r"0\.25 GiB of device memory are needed, 0\.20 GiB are free"),
    ],
)
def test_reports_an_unsupported_gpu_before_loading(
    tmp_path: Path, change: dict, message: str
) -> None:
    write_cuda_engine(tmp_path / "engine")
    facts = dataclasses.replace(HOPPER, **change)
    with pytest.raises(UnsupportedHereError, match=message) as refused:
        load(tmp_path / "engine", facts)
    assert "\n" not in str(refused.value)
    plan = check.read_plan(tmp_path / "engine", read_manifest(tmp_path / "engine"))
    gpu = FakeGpu(facts=facts)
    assert len(gpu_reasons(plan, gpu)) == 1
    assert gpu.log == []


def test_check_opens_and_releases_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_cuda_engine(tmp_path / "engine")
    gpu = FakeGpu()
    monkeypatch.setattr(check, "open_gpu", lambda: gpu)
    assert check_here(manifest, tmp_path / "engine") == []
    assert gpu.closed

    def none(_number: int = 0) -> None:
        raise UnsupportedHereError("no NVIDIA driver was found")

    monkeypatch.setattr(check, "open_gpu", none)
    assert check_here(manifest, tmp_path / "engine") == ["no NVIDIA driver was found"]
    monkeypatch.setattr(loading, "open_gpu", none)
    with pytest.raises(UnsupportedHereError, match="no NVIDIA driver"):
        Engine.load(tmp_path / "engine")


def test_rejects_threads_and_other_devices(tmp_path: Path) -> None:
    write_cuda_engine(tmp_path / "engine")
    with pytest.raises(UnsupportedHereError, match=r"threads is 4, but .* computes on a GPU"):
        Engine.load(tmp_path / "engine", RuntimeSettings(threads=4))
    with pytest.raises(UnsupportedHereError, match="built for cuda, not for cpu"):
        Engine.load(tmp_path / "engine", RuntimeSettings(device="cpu"))


@pytest.mark.parametrize("name", ["plan.json", "prefill@4.json", "prefill@4.cubin"])
def test_rejects_a_flipped_bit(tmp_path: Path, name: str) -> None:
    path = tmp_path / "engine"
    write_cuda_engine(path)
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 4
    (path / name).write_bytes(data)
    with pytest.raises(EngineFileError, match=f"{name} is damaged"):
        engine, _ = load(path)
        run(engine, [[1]], GenerateParams(max_new_tokens=2), speculation=None)


def test_damaged_weights_are_reported_and_the_gpu_is_released(tmp_path: Path) -> None:
    path = tmp_path / "engine"
    write_cuda_engine(path)
    data = bytearray((path / "weights.safetensors").read_bytes())
    data[-1] ^= 4
    (path / "weights.safetensors").write_bytes(data)
    manifest = read_manifest(path)
    gpu = FakeGpu()
    with pytest.raises(EngineFileError, match=r"damaged .wrong checksum in chunk 0"):
        loading.open_executor(path, manifest, readers=2, open_device=lambda: gpu)
    assert (gpu.allocations, gpu.closed) == (0, True)


def test_rejects_a_plan_of_other_weights(tmp_path: Path) -> None:
    path = tmp_path / "engine"
    manifest = write_cuda_engine(path)
    plan = check.read_plan(path, manifest)
    other = [dataclasses.replace(b, bytes=b.bytes + 4) for b in plan.buffers[:1]]
    for changed, message in (
        (other, "d2t has 68 bytes, the plan wants 72"),
        ([Buffer("gone", "weights", 4)], "gone is missing"),
    ):
        buffers = (*changed, *plan.buffers[1:])
        broken = dataclasses.replace(plan, buffers=buffers)
        with pytest.raises(OutdatedEngineError, match=message):
            loading.weight_pieces(path, manifest, broken, tuple(range(len(buffers))))


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU here")  # noqa: PTH110
def test_reports_a_machine_without_a_gpu() -> None:
    with pytest.raises(UnsupportedHereError, match="NVIDIA driver"):
        driver.open_gpu()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mood": "calm"}, "plan.json: unknown keys mood"),
        ({"ranks": 2}, "the plan is for 2 ranks, the manifest for 1"),
    ],
)
def test_a_plan_of_another_version_gives_the_build_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict, problem: str
) -> None:
    path = tmp_path / "engine"
    manifest = write_cuda_engine(path)
    (path / "plan.json").write_text(
        json.dumps(json.loads((path / "plan.json").read_text()) | changes)
    )
    files = {**manifest.files, "plan.json": file_entry(path / "plan.json", chunked=False)}
    write_manifest(path, dataclasses.replace(manifest, files=files, options={"max_seq_len": 24}))
    command = (
        f"build the engine again: specbuild build --model CHECKPOINT --draft DRAFT --output {path} "
        "--backend cuda --max-seq-len 24 --force"
    )
    for arguments in (["check"], ["inspect"], ["run", "--prompt", "a"]):
        assert main([arguments[0], str(path), *arguments[1:]]) == 2
        sentence = capsys.readouterr().err.strip()
        assert problem in sentence and sentence.endswith(command), sentence
    assert sentence.count("build the engine again") == 1
