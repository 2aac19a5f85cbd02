"""A prompt's bits on a GPU do not depend on chunk boundaries, program sizes, or other prompts."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from shutil import copytree

import pytest
from example_engine import EXAMPLE, build_example, on_gpu, outputs, records
from prompt_cuts import cut_at_random

from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.retrofit.config import LatentOptions
from specbuild.builder.training.retrofit.mla import retrofit_mla
from specbuild.runtime.engine import Engine
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

# Prompts after the checked one, its length, and prompts before it.
NEIGHBOURS, LENGTH, OTHERS = (3, 130), 900, (260, 64, 17)
TOKENS = 24


@pytest.fixture(scope="module", params=["keys and values", "codes", "latents"])
def cut_engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine with prompt programs of several sizes."""
    if request.param == "keys and values":
        yield request.getfixturevalue("engine")
        return
    if request.param == "codes":
        coded = build_example(tmp_path_factory.mktemp("codes") / "cuda", kv_dtype="fp8")
        with on_gpu(coded) as loaded:
            yield loaded
        return
    model = tmp_path_factory.mktemp("cuts") / "target"
    copytree(EXAMPLE / "target", model)
    retrofit_mla(LatentOptions(model=model, rank=64), SilentProgress())
    with on_gpu(build_example(model.parent / "cuda", model=model)) as loaded:
        yield loaded


def given(engine: Engine) -> list[Prompt]:
    """Return parts of a text with different first tokens."""
    assert engine.text is not None
    ids = engine.text.encode(inspect.getsource(textwrap), raw=True, most_tokens=1 << 15)
    lengths = (*NEIGHBOURS, LENGTH, *OTHERS)
    return [Prompt(str(n), tuple(ids[31 * i : 31 * i + n])) for i, n in enumerate(lengths)]


def params(prompts: list[Prompt]) -> list[GenerateParams]:
    """Return parameters of which every second one uses sampling."""
    return [
        GenerateParams(
            max_new_tokens=TOKENS,
            sampling=SamplingParams(temperature=float(i % 2), seed=i),
            ignore_eos=True,
        )
        for i in range(len(prompts))
    ]


def program_rows(engine: Engine) -> list[int]:
    assert isinstance(engine.executor, CudaExecutor)
    return sorted(p.rows for p in engine.executor.plan.programs if p.kind == "prefill")


def test_ten_random_chunkings_change_no_bit(cut_engine: Engine) -> None:
    """Alone and in batches, compare the first log-probability and all later tokens."""
    prompts, place = given(cut_engine), len(NEIGHBOURS)
    asked, sizes = params(prompts), program_rows(cut_engine)
    assert len(sizes) >= 3
    whole = [
        outputs(records(cut_engine, [p], [a], None))[0] for p, a in zip(prompts, asked, strict=True)
    ]
    used: set[int] = set()
    for seed in range(10):
        with cut_at_random(seed, 2 * LENGTH) as launched:
            alone = records(cut_engine, [prompts[place]], [asked[place]], None)
            together = records(cut_engine, prompts, asked, None)
        used |= {next(rows for rows in sizes if rows >= count) for count in launched}
        description = f"seed {seed}, launches of {launched} rows"
        assert outputs(alone)[0] == whole[place], description
        for i, (result, expected) in enumerate(zip(outputs(together), whole, strict=True)):
            assert result == expected, f"prompt {i}, {description}"
    assert len(used) >= 3, used


def test_a_prompt_in_the_smallest_program_and_in_the_largest(cut_engine: Engine) -> None:
    """Use one row a launch, and all rows in one launch."""
    prompts = given(cut_engine)
    asked = params(prompts)
    largest = outputs(records(cut_engine, prompts, asked, None))
    for prompt, expected, one in zip(prompts[:2], asked, largest, strict=False):
        with cut_at_random(0, 1) as launched:
            alone = outputs(records(cut_engine, [prompt], [expected], None))[0]
        assert set(launched) == {1}
        assert alone == one
