"""Tests that need full TensorRT: building, loading, running, losslessness, comparison."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import pytest
from example_engine import CHAIN, TREE, records

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_file, read_manifest
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.registry import check_here
from specbuild.runtime.executors.tensorrt.library import load, new_logger
from specbuild.runtime.executors.tensorrt.plugin_record import NAME_PREFIX
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

TOKENS = 128


def test_check_reports_no_problem(directory: Path) -> None:
    assert check_here(read_manifest(directory), directory) == []


def test_engines_contain_plugins_and_no_weights(directory: Path, engine: Engine) -> None:
    """Compare ports, profiles and aliases as TensorRT reports them."""
    trt = load("tensorrt")
    runtime = trt.Runtime(new_logger(trt, []))
    manifest = read_manifest(directory)
    for name, role in manifest.roles.items():
        if not role.file.endswith(".engine"):
            continue
        assert sum(role.layers.values()) >= sum(role.ops.values())
        data = bytes(read_file(directory, manifest, role.file))
        print(f"{role.file}: {len(data) / 1e6:.1f} MB, layers {role.layers}")
        held = runtime.deserialize_cuda_engine(data)
        assert held is not None
        names = {held.get_tensor_name(i) for i in range(held.num_io_tensors)}
        ports = {port.name for port in (*role.inputs, *role.outputs)}
        assert names == ports | set(role.tensors)
        assert held.num_optimization_profiles == len(role.profiles)
        for port in role.inputs:
            if port.name.endswith("_pool"):
                assert held.get_aliased_input_tensor(f"{port.name}.out") == port.name
        assert all(f"{NAME_PREFIX}" in op for op in role.ops), name


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_draft_changes_no_bit(engine: Engine, prompts: list[Prompt], temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    parameters = GenerateParams(max_new_tokens=TOKENS, sampling=sampling, ignore_eos=True)
    plain = records(engine, prompts, parameters, None)
    for shape in (CHAIN, TREE):
        drafted = records(engine, prompts, parameters, shape)
        for a, b in zip(plain, drafted, strict=True):
            assert (a.output_ids, a.logprobs) == (b.output_ids, b.logprobs)
        assert sum(sum(r.stats.acceptance_histogram[1:]) for r in drafted) > len(prompts)


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_bits_equal_those_of_the_plugins_without_tensorrt(
    engine: Engine, walked: Engine, prompts: list[Prompt], shape: DraftShape | None
) -> None:
    """TensorRT adds no arithmetic: tokens and log-probabilities are equal."""
    sampling = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    actual, alone = (records(e, prompts, sampling, shape) for e in (engine, walked))
    for a, b in zip(actual, alone, strict=True):
        assert (a.output_ids, a.logprobs) == (b.output_ids, b.logprobs)


@pytest.mark.parametrize("shape", [None, CHAIN], ids=["plain", "chain"])
def test_agrees_with_the_cuda_engine(
    engine: Engine, cuda_engine: Engine, prompts: list[Prompt], shape: DraftShape | None
) -> None:
    """First tokens are equal, and the times of both are printed."""
    sampling = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    by_key = {}
    for name, loaded in (("tensorrt", engine), ("cuda", cuda_engine)):
        records(loaded, prompts[:1], sampling, shape)
        started_s = perf_counter()
        by_key[name] = records(loaded, prompts[:1], sampling, shape)
        taken_s = perf_counter() - started_s
        print(f"{name}: {TOKENS / taken_s:.0f} tokens/s, one sequence, prompt included")
    firsts = [
        [r.output_ids[0] for r in records(e, prompts, sampling, shape)]
        for e in (engine, cuda_engine)
    ]
    same = sum(a == b for a, b in zip(*firsts, strict=True))
    assert same >= 0.95 * len(prompts)
