"""A model with MLA on a GPU beside what else an engine does: prefixes, chains of the host, codes.

``test_dense_gpu.py`` compares such models with transformers, and their bits alone and together.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from dense_models import VOCAB, build_dense
from example_engine import (
    CHAIN,
    TREE,
    every_other_sampled,
    on_gpu,
    outputs,
    random_prompts,
    records,
)

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import GenerateParams, Prompt

pytestmark = pytest.mark.timeout(600)

LENGTHS, TOKENS = (5, 230, 40, 17), 64


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Youtu's heads, with a random draft and suffix decoding."""
    return build_dense(tmp_path_factory.mktemp("mla"), "youtu", drafter="suffix")[1]


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    with on_gpu(directory) as loaded:
        yield loaded


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["none", "chain", "tree"])
def test_a_known_beginning_has_the_bits_of_a_cold_run(
    directory: Path, engine: Engine, shape: DraftShape | None
) -> None:
    ids = np.random.default_rng(3).integers(3, VOCAB, 400).tolist()
    prompts = [Prompt("whole", tuple(ids)), Prompt("part", (*ids[:200], *ids[300:350]))]
    asked = every_other_sampled(2, TOKENS)
    pairs = list(zip(prompts, asked, strict=True))
    cold = [outputs(records(engine, [prompt], [of], shape))[0] for prompt, of in pairs]
    with on_gpu(directory) as caching:
        caching.keep_prefixes()
        for known in ((0, 192), (384, 192)):
            found = [records(caching, [prompt], [of], shape)[0] for prompt, of in pairs]
            assert outputs(found) == cold
            assert tuple(record.stats.cached_tokens for record in found) == known


def test_chains_of_the_host_change_no_bit(engine: Engine) -> None:
    prompts, asked = random_prompts(VOCAB, LENGTHS), every_other_sampled(len(LENGTHS), TOKENS)
    plain = outputs(records(engine, prompts, asked, drafter="none"))
    # From the second time on the answers are known texts.
    steps = []
    for _ in range(2):
        made = records(engine, prompts, asked, drafter="suffix")
        assert outputs(made) == plain
        steps.append(sum(record.stats.steps for record in made))
    assert steps[1] < 0.7 * len(LENGTHS) * TOKENS


@pytest.mark.parametrize("dtype", ["fp8", "mxfp4"])
def test_coded_projections_are_as_lossless(tmp_path: Path, dtype: str) -> None:
    _, output = build_dense(tmp_path, "youtu", weights_dtype=dtype)
    prompts = random_prompts(VOCAB, LENGTHS)
    greedy = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    with on_gpu(output) as coded:
        alone = [outputs(records(coded, [prompt], greedy, None))[0] for prompt in prompts]
        assert outputs(records(coded, prompts, greedy, None)) == alone
        assert outputs(records(coded, prompts, greedy, TREE)) == alone
