"""An int8-prefiltered head changes no token, with and without a draft, alone and in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from example_engine import CHAIN, TREE, build_example, on_gpu, records

from specbuild.plugins_cuda.head_screen.lowering import MAX_ROWS
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

TOKENS = 96


@pytest.fixture(scope="module")
def screened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The example engine with an int8 prefilter for its head."""
    output = tmp_path_factory.mktemp("screened") / "cuda"
    with on_gpu(build_example(output, prefilter_head=True)) as loaded:
        yield loaded


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["none", "chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_tokens_equal_those_of_the_full_head(
    engine: Engine,
    screened: Engine,
    prompts: list[Prompt],
    temperature: float,
    shape: DraftShape | None,
) -> None:
    params = [
        GenerateParams(
            max_new_tokens=TOKENS,
            ignore_eos=True,
            sampling=SamplingParams(temperature=temperature, seed=seed),
        )
        for seed in range(len(prompts[:8]))
    ]
    for some in (slice(0, 1), slice(0, 8)):
        some_params = params[some]
        whole = records(engine, prompts[some], some_params, shape)
        result = records(screened, prompts[some], some_params, shape)
        assert [r.output_ids for r in result] == [r.output_ids for r in whole]
        # Launches of more rows read the full head.
        if len(some_params) * (1 + (shape.draft_tokens if shape else 0)) <= MAX_ROWS:
            assert all(r.logprobs is not None and set(r.logprobs[1:]) == {None} for r in result)
        with_logprobs = records(
            screened, prompts[some], [replace(p, logprobs=True) for p in some_params], shape
        )
        assert [r.output_ids for r in with_logprobs] == [r.output_ids for r in whole]
        # The returned log-probabilities come from logits, which another kernel adds up.
        for mine, desired in zip(with_logprobs, whole, strict=True):
            np.testing.assert_allclose(mine.logprobs, desired.logprobs, atol=1e-3)
