"""Models with recurrent states on a GPU: chains of the host's, joins and preemptions.

What a random draft, trees and the cuts of prompts change is in test_dense_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from dense_models import GEOMETRIES, SIZES, VOCAB
from example_engine import every_other_sampled, on_gpu, outputs, random_prompts, records
from llama_checkpoints import write_llama
from test_dense_gpu import forward
from test_transformers_gpu import near_tie

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.request import GenerateParams

pytestmark = pytest.mark.timeout(600)

TOKENS = 288


@dataclass(frozen=True)
class Model:
    """A random checkpoint, and its engine with suffix decoding."""

    path: Path
    engine: Engine


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("hybrid")
    kind, changes = GEOMETRIES[request.param]
    write_llama(folder / "model", kind, **SIZES | changes)
    options = BuildOptions.from_flat(
        model=folder / "model", output=folder / "engine", backend="cuda", max_seq_len=512,
        max_batch_size=8, drafter="suffix",
    )  # fmt: skip
    build(options, SilentProgress())
    with on_gpu(folder / "engine") as engine:
        yield Model(folder / "model", engine)


def test_greedy_tokens_are_those_of_transformers_but_for_near_ties(model: Model) -> None:
    greedy = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    prompts = random_prompts(VOCAB, [100])
    (record,) = records(model.engine, prompts, greedy, drafter="none")
    ids = (*(prompts[0].prompt_ids or ()), *record.output_ids)
    wanted = forward(model.path, ids)
    rows = np.arange(99, len(ids) - 1)
    lost = wanted.fp32[rows].max(axis=1) - wanted.fp32[rows, np.array(record.output_ids)]
    near = near_tie(wanted)
    others = (lost > 0).sum()
    print(
        f"{others} of {TOKENS} tokens are not fp32's best, by up to {lost.max():.4f} of {near:.4f}"
    )
    assert lost.max() < near


@pytest.mark.parametrize("count", [1, 5, 20])
def test_chains_of_the_host_and_neighbours_change_no_bit(model: Model, count: int) -> None:
    """Up to eight sequences together; others join as some end. Then the answers are known texts."""
    prompts = random_prompts(VOCAB, [5 + 37 * i % 190 for i in range(count)])
    asked = every_other_sampled(count, TOKENS)
    alone = [
        outputs(records(model.engine, [prompt], [params], drafter="none"))[0]
        for prompt, params in zip(prompts, asked, strict=True)
    ]
    assert outputs(records(model.engine, prompts, asked, drafter="none")) == alone
    accepted = 0
    for _ in range(2):
        made = records(model.engine, prompts, asked, drafter="suffix")
        assert outputs(made) == alone
        accepted += sum(sum(record.stats.acceptance_histogram[1:]) for record in made)
    assert accepted > 0
