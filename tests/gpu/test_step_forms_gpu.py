"""General steps on a GPU have the tokens and log-probabilities of the exact programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exact_steps import STEP_FORMS, exact_forms
from example_engine import (
    EXAMPLE,
    build_example,
    linked_target,
    on_gpu,
    outputs,
    random_prompts,
    records,
)

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

CHAIN = DraftShape(1, 2, 2)
THRESHOLD = 128
MODES: dict[str, Any] = {
    "max_batch_size": 2,
    "max_seq_len": 768,
    "dsa": True,
    "dsa_top_k": 64,
    "dsa_threshold": THRESHOLD,
    "dsa_check_interval": 4,
    "dsa_min_agreement": 0.0,
    "specpv": True,
    "specpv_score": "indexer",
    "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 8,
    "specpv_n_window_blocks": 2,
    "specpv_partial_threshold": THRESHOLD,
    "specpv_full_refresh_interval": 6,
}
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, seed=5),
    "cut": SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, seed=5),
}
# The number of blocks that views retrieve, and of tokens that rows select; 0 means all.
ASKED = {"neither": (0, 0), "views": (2, 0), "lists": (0, 48), "both": (2, 48)}


def built(folder: Path) -> Path:
    """Build the example with both lossy modes."""
    target = linked_target(folder)
    for file in (EXAMPLE / "dsa").glob("*.safetensors"):
        (target / file.name).symlink_to(file)
    return build_example(folder / "cuda", CHAIN, model=target, **MODES)


@pytest.fixture(scope="module")
def general(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with on_gpu(built(tmp_path_factory.mktemp("general"))) as engine:
        yield engine


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same engine with a program for every combination."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(STEP_FORMS, exact_forms)
        directory = built(tmp_path_factory.mktemp("exact"))
    with on_gpu(directory) as engine:
        yield engine


def decode(
    engine: Engine,
    mode: str,
    sampling: SamplingParams,
    shape: DraftShape | None,
    lengths: tuple[int, ...],
) -> list[RunRecord]:
    blocks, chosen = ASKED[mode]
    params = [
        GenerateParams(
            max_new_tokens=64,
            ignore_eos=True,
            specpv_retrieval_blocks=blocks,
            dsa_top_k=chosen,
            sampling=replace(sampling, seed=sampling.seed + i),
        )
        for i in range(len(lengths))
    ]
    return records(engine, random_prompts(4000, lengths), params, shape)


def test_general_steps_need_few_programs(general: Engine, exact: Engine) -> None:
    few, many = (
        sum(entry.kind == "step" for entry in engine.executor.plan.programs)
        for engine in (general, exact)
        if isinstance(engine.executor, CudaExecutor)
    )
    # Two sequences, no draft (two kinds) and chains of one and two: 16 without a lossy mode.
    assert (few, many) == (20, 120)


@pytest.mark.parametrize("lengths", [(400,), (100, 301, 126)], ids=["one", "three"])
@pytest.mark.parametrize("shape", [None, CHAIN], ids=["none", "chain"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("mode", ASKED)
def test_general_steps_have_the_bits_of_exact_ones(
    general: Engine,
    exact: Engine,
    mode: str,
    sampling: str,
    shape: DraftShape | None,
    lengths: tuple[int, ...],
) -> None:
    expected, result = (
        decode(engine, mode, SAMPLINGS[sampling], shape, lengths) for engine in (exact, general)
    )
    assert outputs(result) == outputs(expected)
    for mine, desired in zip(result, expected, strict=True):
        assert mine.stats.dsa == desired.stats.dsa
        views, exactly = mine.stats.specpv, desired.stats.specpv
        assert views is not None and exactly is not None and mine.stats.dsa is not None
        # More re-verified tokens are sampled again, which the agreement counts.
        assert views.partial_steps == exactly.partial_steps
        assert views.full_steps == exactly.full_steps
        if len(mine.prompt_ids) > THRESHOLD:
            assert (views.partial_steps > 4) == (mode in ("views", "both"))
            assert (mine.stats.dsa.checked_steps > 4) == (mode in ("lists", "both"))


def test_top_k_of_one_row_does_not_change_bits_of_another(general: Engine) -> None:
    """Put greedy and sampled rows in a batch with rows that use top-k and top-p, and alone."""
    lengths = (300, 200, 130)
    kinds = [SAMPLINGS[name] for name in ("greedy", "cut", "sampled")]
    params = [
        GenerateParams(max_new_tokens=48, ignore_eos=True, sampling=replace(kind, seed=i))
        for i, kind in enumerate(kinds)
    ]
    prompts = random_prompts(4000, lengths)
    together = outputs(records(general, prompts, params, CHAIN))
    for i, prompt in enumerate(prompts):
        assert outputs(records(general, [prompt], params[i], CHAIN)) == [together[i]]
