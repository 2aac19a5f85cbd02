"""The properties of the machine, the engines it can run, and light imports of the runtime."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_cuda_engine_directory import write_cuda_engine
from toy_model import toy_manifest

from specbuild.runtime.device import (
    Device,
    cache_bytes,
    group_bytes,
    pool_bytes,
    this_device,
)
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import SpecPv, StoredFile
from specbuild.runtime.errors import RequestError, UnsupportedHereError
from specbuild.runtime.executors.cpu.check import needed_bytes
from specbuild.runtime.executors.cuda import loading
from specbuild.runtime.executors.registry import check_here, gpu_numbers
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import RuntimeSettings

# An engine of graphs is checked by its manifest alone.
NOWHERE = Path()
HERE = Device("a cpu", 2, 1 << 30, "1.31.1")


def test_this_machine_runs_the_toy() -> None:
    here = this_device()
    assert here.cpu_name
    assert here.cores >= 1
    assert here.onnxruntime is not None
    assert check_here(toy_manifest(), NOWHERE) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"onnxruntime": None}, "not installed"),
        ({"onnxruntime": "1.9.0"}, "1.9.0, 1.31 or later"),
        ({"available_bytes": 100}, "GiB of memory are free"),
    ],
)
def test_every_missing_requirement_is_reported(change: dict, message: str) -> None:
    (reason,) = check_here(toy_manifest(), NOWHERE, dataclasses.replace(HERE, **change))
    assert message in reason


def test_memory_counts_every_layer_of_every_group_and_the_files() -> None:
    manifest = toy_manifest()
    expected = sum(2 * 4 * g.pages * g.page_size for g in manifest.cache_groups)
    assert cache_bytes(manifest) == expected
    full = dataclasses.replace(manifest, files={"w": StoredFile(2 << 30, "0" * 32)})
    assert check_here(full, NOWHERE, HERE)
    two_layers = [dataclasses.replace(g, layers=(0, 1)) for g in manifest.cache_groups]
    assert (
        cache_bytes(dataclasses.replace(manifest, cache_groups=tuple(two_layers))) == 2 * expected
    )


def test_the_runtime_imports_numpy_and_nothing_heavy() -> None:
    heavy = "torch onnx onnxruntime transformers tokenizers jinja2 xxhash safetensors typer rich"
    code = (
        "import sys, specbuild.runtime.engine\n"
        f"print([m for m in {heavy.split()!r} if m in sys.modules], "
        "[m for m in sys.modules if m.startswith(('specbuild.plugins', 'specbuild.builder'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e-40},
        {"temperature": 1e300},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"seed": -(2**63) - 1},
        {"seed": 2**64},
    ],
)
def test_rejects_sampling_out_of_range(values: dict) -> None:
    with pytest.raises(RequestError, match=next(iter(values))):
        SamplingParams(**values)


@pytest.mark.parametrize("values", [{"max_new_tokens": 0}, {"stop": ("a", "")}])
def test_rejects_parameters_out_of_range(values: dict) -> None:
    with pytest.raises(RequestError):
        GenerateParams(**values)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_the_size_of_pools_depends_on_their_type(dtype: str, size: int) -> None:
    group = replace(toy_manifest().cache_groups[0], dtype=dtype)
    values = group.pages * group.page_size * group.kv_heads * (group.k_width + group.v_width)
    assert pool_bytes(group) == size * values * len(group.layers)


def test_the_size_includes_block_summaries() -> None:
    """Two rows a page and KV head, of the keys' width."""
    specpv = SpecPv(16, 2, 256, 8, 64, 4096, 32)
    group = toy_manifest().cache_groups[0]
    summaries = len(group.layers) * group.pages * group.kv_heads * 2 * group.k_width * 4
    assert group.name == "full"
    assert group_bytes(group, specpv) == pool_bytes(group) + summaries
    assert group_bytes(replace(group, name="sliding"), specpv) == pool_bytes(group)


def test_an_engine_may_use_all_free_memory_and_the_minimum_version() -> None:
    manifest = toy_manifest()
    needed = needed_bytes(manifest)
    here = replace(HERE, available_bytes=needed, onnxruntime="1.31.0")
    assert check_here(manifest, NOWHERE, here) == []
    assert len(check_here(manifest, NOWHERE, replace(here, available_bytes=needed - 1))) == 1
    assert len(check_here(manifest, NOWHERE, replace(here, onnxruntime="1.30.9"))) == 1


def test_a_device_names_one_gpu_of_several() -> None:
    cpu, here = toy_manifest(), NOWHERE
    cuda = replace(cpu, backend="cuda")
    names = (None, "cuda", "cuda:0", "cuda:12")
    assert [gpu_numbers(here, cuda, name) for name in names] == [(0,), (0,), (0,), (12,)]
    assert gpu_numbers(here, cpu, None) == gpu_numbers(here, cpu, "cpu") == (0,)
    two = replace(cuda, ranks=2)
    assert [gpu_numbers(here, two, name) for name in (None, "cuda:3,1")] == [(0, 1), (3, 1)]
    for manifest, name, said in (
        (cpu, "cuda:1", "built for cpu, not for cuda:1; use device 'cpu' or build it for cuda"),
        (cuda, "cpu", "built for cuda, not for cpu"),
        (cpu, "cpu:0", "only engines for cuda take a number"),
        (replace(cpu, backend="tensorrt"), "tensorrt:1", "only engines for cuda"),
        (cuda, "cuda:", "must be like 'cuda:0'"),
        (
            cuda,
            "cuda:0,1",
            "runs on 1 GPU, device 'cuda:0,1' names 2; name as many, such as 'cuda:0'",
        ),
        (two, "cuda:1", "runs on 2 GPUs, device 'cuda:1' names 1; name as many"),
        (two, "cuda:1,1", "names a GPU twice"),
        (two, "cuda:0,", "must be like 'cuda:0,1'"),
        (cuda, "cuda:-1", "must be like 'cuda:0'"),
        (cuda, "cuda:\u0663", "must be like 'cuda:0'"),
    ):
        with pytest.raises(UnsupportedHereError, match=re.escape(said)):
            gpu_numbers(here, manifest, name)


def test_opens_the_selected_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cuda_engine(tmp_path / "engine")
    asked: list[int] = []

    def open_gpu(number: int) -> None:
        asked.append(number)
        raise UnsupportedHereError("there are 2 GPUs")

    monkeypatch.setattr(loading, "open_gpu", open_gpu)
    for device in (None, "cuda:1"):
        with pytest.raises(UnsupportedHereError, match="there are 2 GPUs"):
            Engine.load(tmp_path / "engine", RuntimeSettings(device))
    assert asked == [0, 1]
