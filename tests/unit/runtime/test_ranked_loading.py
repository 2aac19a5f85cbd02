"""Open an engine of several ranks: each GPU has its part, or a sentence names the GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from fake_gpu import HOPPER
from fake_ranks import RankGpu, ranked_plan
from test_several_ranks import write_ranked
from toy_plan import cuda_manifest, toy_plan

from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.plan import Buffer, Plan
from specbuild.runtime.errors import EngineFileError, UnsupportedHereError
from specbuild.runtime.executors.cuda import loading

NUMBERS = (3, 5)


def plan_with_weights() -> Plan:
    """Return the toy's plan with weights: a part for each rank, and a shared tensor."""
    plan = ranked_plan(toy_plan(cuda_manifest()), 2)
    buffers = (Buffer("proj", "weights", 32), *plan.buffers[1:], Buffer("norm", "weights", 12))
    return dataclasses.replace(plan, buffers=buffers)


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """The manifest of the engine in ``tmp_path / "engine"``."""
    monkeypatch.setattr(loading, "read_plan", lambda *_: plan_with_weights())
    return write_ranked(tmp_path / "engine")


class Host:
    """GPUs by number. One may have little memory."""

    def __init__(self, *, small: int | None = None) -> None:
        self.gpus: list[RankGpu] = []
        self.small = small
        self.opened: list[int] = []

    def open(self, number: int) -> RankGpu:
        self.opened.append(number)
        nbytes = 1000 if number == self.small else HOPPER.total_bytes
        return RankGpu(self.gpus, {}, dataclasses.replace(HOPPER, total_bytes=nbytes))


def test_each_gpu_has_its_part_and_the_shared_tensors(tmp_path: Path, manifest: Manifest) -> None:
    host = Host()
    executor = loading.open_ranked(
        tmp_path / "engine", manifest, NUMBERS, readers=3, open_device=host.open
    )
    assert host.opened == list(NUMBERS)
    for rank, (gpu, own) in enumerate(zip(host.gpus, executor.ranks, strict=True)):
        part = gpu.view(own.addresses[0], 32).view(np.float32)
        assert part.tolist() == [rank + 1.0] * 8
        assert gpu.view(own.addresses[-1], 12).view(np.float32).tolist() == [0.0, 1.0, 2.0]
    executor.close()
    assert all(gpu.closed for gpu in host.gpus)


@pytest.mark.parametrize("rank", [0, 1])
def test_rejects_a_damaged_file_of_one_rank(tmp_path: Path, manifest: Manifest, rank: int) -> None:
    file = tmp_path / "engine" / f"weights.{rank}.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    host = Host()
    with pytest.raises(EngineFileError, match=rf"weights\.{rank}\.safetensors"):
        loading.open_ranked(
            tmp_path / "engine", manifest, NUMBERS, readers=3, open_device=host.open
        )
    assert all(gpu.closed and not gpu.allocations for gpu in host.gpus)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_error_names_a_gpu_without_memory(
    tmp_path: Path, manifest: Manifest, number: int
) -> None:
    host = Host(small=number)
    with pytest.raises(UnsupportedHereError, match=f"GPU {number}: .* are free"):
        loading.open_ranked(
            tmp_path / "engine", manifest, NUMBERS, readers=3, open_device=host.open
        )
    assert all(gpu.closed and not gpu.allocations for gpu in host.gpus)


def test_requires_one_gpu_for_each_rank(tmp_path: Path, manifest: Manifest) -> None:
    with pytest.raises(UnsupportedHereError, match="runs on 2 GPUs, 1 are given"):
        loading.open_ranked(tmp_path / "engine", manifest, (0,), readers=1)
