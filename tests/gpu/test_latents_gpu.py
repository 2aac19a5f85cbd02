"""The example model with latent caches on a GPU: losslessness, CPU engine, memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from example_engine import CHAIN, EXAMPLE, TREE, build_example, on_gpu, records

from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.retrofit.config import LatentOptions
from specbuild.builder.training.retrofit.mla import retrofit_mla
from specbuild.runtime.decode.device.decoder import DeviceDecoder
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.executors.cuda.memory import footprint
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

RANK, PROMPTS, TOKENS, FORCED_TOKENS = 64, 40, 128, 64
# bf16 may exchange two logits that are closer than this.
NEAR_TIE = 0.1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with half the cache, by a plain SVD of every layer."""
    path = tmp_path_factory.mktemp("latent") / "target"
    copytree(EXAMPLE / "target", path)
    retrofit_mla(LatentOptions(model=path, rank=RANK), SilentProgress())
    return path


@pytest.fixture(scope="module")
def latent(model: Path) -> Iterator[Engine]:
    with on_gpu(build_example(model.parent / "cuda", model=model)) as loaded:
        yield loaded


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_draft_changes_no_token_and_no_bit_of_a_logprob(
    latent: Engine, prompts: list[Prompt], temperature: float, shape: DraftShape
) -> None:
    expected = [
        GenerateParams(
            max_new_tokens=TOKENS,
            sampling=SamplingParams(temperature=temperature, seed=seed),
            ignore_eos=True,
        )
        for seed in range(len(prompts[:PROMPTS]))
    ]
    plain = records(latent, prompts[:PROMPTS], expected, None)
    drafted = records(latent, prompts[:PROMPTS], expected, shape)
    for a, b in zip(plain, drafted, strict=True):
        assert len(b.output_ids) == TOKENS
        assert a.output_ids == b.output_ids
        assert a.logprobs == b.logprobs
    assert sum(sum(r.stats.acceptance_histogram[1:]) for r in drafted) > len(drafted)


def test_greedy_tokens_equal_the_cpu_engine_under_teacher_forcing(
    model: Path, latent: Engine, prompts: list[Prompt]
) -> None:
    cpu = Engine.load(build_example(model.parent / "cpu", model=model, backend="cpu"))
    decoder = latent.decoder
    assert isinstance(decoder, DeviceDecoder)
    lost: list[float] = []
    params = GenerateParams(max_new_tokens=FORCED_TOKENS, ignore_eos=True)
    for record in records(cpu, prompts[:12], params, None):
        ids = (*record.prompt_ids, *record.output_ids)
        logits = np.concatenate([scored.logits for scored in decoder.score(ids[:-1])])
        rows = logits[len(record.prompt_ids) - 1 :]
        tokens = np.array(record.output_ids)
        lost += (rows.max(axis=1) - rows[np.arange(len(rows)), tokens]).tolist()
    print(f"{sum(x > 0 for x in lost)} of {len(lost)} differ, by {max(lost):.3f} at most")
    assert sum(x == 0 for x in lost) / len(lost) >= 0.98
    assert max(lost) < 2 * NEAR_TIE


def test_latent_caches_need_half_the_memory(latent: Engine, engine: Engine) -> None:
    """With equal limits, the draft's cache is unchanged."""
    sizes = []
    for each in (latent, engine):
        assert isinstance(each.executor, CudaExecutor)
        plan = each.executor.plan
        assert footprint(plan).cache > 0
        names = [b for b in plan.buffers if b.space == "cache" and b.name != "cache:draft"]
        sizes.append(sum(buffer.bytes for buffer in names))
    assert sizes[0] * 2 == sizes[1]
