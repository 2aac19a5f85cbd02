"""Keys and values in fp8 on a GPU: written values at real sizes; tokens against the CPU engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from example_engine import CHAIN, EXAMPLE, build_example, on_gpu, records

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.tuning.kernel_case import bits, kernel_case, values
from specbuild.builder.backends.cuda.tuning.op_runner import OpRunner
from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.plugins_cuda.kv_write.codes import as_codes
from specbuild.plugins_cuda.launches import (
    Lowering,
    LoweringRequest,
    Phase,
    Target,
    TensorInfo,
)
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_qkv_rope.cases import GPT_OSS, LLAMA_8B, project
from specbuild.runtime.device import pool_bytes
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.request import GenerateParams, Prompt

PROJECTIONS = op_named("RmsQkvRope")
POOLS = ("k_pool", "v_pool")
TOKENS = 120
# The fraction of a logit's spread by which bf16, and values rounded the other way, may change the
# best token.
DOUBT = 0.2


@pytest.fixture(scope="module")
def runner() -> Iterator[OpRunner]:
    yield OpRunner(Compiler("sm_90a"))


def lowered(runner: OpRunner, request: LoweringRequest) -> Lowering:
    """Lower with the first tactic that does not spill registers, as in a build."""
    assert PROJECTIONS.lower is not None and PROJECTIONS.tactics is not None
    tactics = ({}, *PROJECTIONS.tactics(request))
    lowerings = (PROJECTIONS.lower(replace(request, tactic=tactic)) for tactic in tactics)
    return next(lowering for lowering in lowerings if runner.refusal(lowering) is None)


@pytest.mark.parametrize(
    ("rows", "phase"), [(1, "decode"), (8, "decode"), (64, "decode"), (300, "prefill")]
)
@pytest.mark.parametrize("model", ["gpt-oss", "llama", "qwen3"])
def test_pools_store_the_rounded_bf16_keys_and_values(
    runner: OpRunner, model: str, rows: int, phase: Phase
) -> None:
    """Compare bit for bit, with and without head norms, in every form of the projections."""
    plain = model == "gpt-oss"
    case = project(
        rows, 2880 if plain else 4096, GPT_OSS if plain else LLAMA_8B, bias=plain, page_size=64,
        rounding="gpt_oss" if plain else "llama", head_norms=model == "qwen3",
    )  # fmt: skip
    drawn = kernel_case(PROJECTIONS, case)
    inputs = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
    outputs = {name: bits(tensor) for name, tensor in drawn.outputs.items()}
    request = drawn.request(phase, Target())
    wide = runner.run(PROJECTIONS, lowered(runner, request), inputs, outputs)
    tensors = {
        name: TensorInfo(info.shape, "uint8") if "_pool" in name else info
        for name, info in request.tensors.items()
    }
    blank = {name: np.zeros(inputs[name].shape, np.uint8) for name in POOLS}
    result = runner.run(
        PROJECTIONS,
        lowered(runner, replace(request, tensors=tensors)),
        {**inputs, **blank},
        {**outputs, **{f"{name}_out": pool for name, pool in blank.items()}},
    )
    np.testing.assert_array_equal(result["q"], wide["q"])
    slots = drawn.inputs["write_slot"].numpy()
    for name in POOLS:
        pool = torch.from_numpy(values(wide[f"{name}_out"], torch.bfloat16))
        expected = np.zeros(pool.shape, np.uint8)
        place = (slots // 64, slice(None), slots % 64)
        expected[place] = as_codes(pool).numpy()[place]
        assert expected.any()
        np.testing.assert_array_equal(result[f"{name}_out"], expected, err_msg=name)


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The example with fp8 caches."""
    with on_gpu(build_example(tmp_path_factory.mktemp("coded") / "cuda", kv_dtype="fp8")) as engine:
        yield engine


def test_caches_need_half_the_bytes(coded: Engine, directory: Path) -> None:
    wide = {group.name: pool_bytes(group) for group in read_manifest(directory).cache_groups}
    half = {group.name: pool_bytes(group) for group in coded.manifest.cache_groups}
    assert {name: 2 * size for name, size in half.items()} == wide
    assert coded.manifest.lossy_groups == ("full", "sliding")


def test_tokens_agree_with_the_cpu_engine_with_fp8_caches(
    coded: Engine, prompts: list[Prompt], tmp_path: Path
) -> None:
    """The drafted tokens are the CPU's best ones, or nearly tie with them."""
    build_options = BuildOptions.from_flat(
        model=EXAMPLE / "target", output=tmp_path / "cpu", max_seq_len=1024, kv_dtype="fp8"
    )
    build(build_options, SilentProgress())
    cpu = Engine.load(tmp_path / "cpu")
    greedy = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    lost, spread = [], []
    for record in records(coded, prompts, greedy, CHAIN):
        ids = (*record.prompt_ids, *record.output_ids)
        logits = np.concatenate([rows.logits for rows in cpu.decoder.score(ids)])
        rows = logits[len(record.prompt_ids) - 1 : len(ids) - 1]
        lost.append(rows.max(axis=1) - rows[np.arange(len(rows)), np.array(record.output_ids)])
        spread.append(rows.std())
    missed = np.concatenate(lost)
    print(f"{(missed == 0).mean():.4f} of {len(missed)} are the CPU's, at most {missed.max():.3f}")
    assert missed.max() < DOUBT * np.mean(spread)
    assert (missed == 0).mean() > 0.97
