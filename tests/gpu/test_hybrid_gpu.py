"""Models with recurrent states on a GPU: host proposals, joining sequences and preemption.

test_dense_gpu.py covers random drafts, trees and chunk boundaries.
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


def test_greedy_tokens_equal_transformers_except_for_near_ties(model: Model) -> None:
    greedy = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    prompts = random_prompts(VOCAB, [100])
    (record,) = records(model.engine, prompts, greedy, drafter="none")
    ids = (*(prompts[0].prompt_ids or ()), *record.output_ids)
    expected = forward(model.path, ids)
    rows = np.arange(99, len(ids) - 1)
    lost = expected.fp32[rows].max(axis=1) - expected.fp32[rows, np.array(record.output_ids)]
    near = near_tie(expected)
    others = (lost > 0).sum()
    print(
        f"{others} of {TOKENS} tokens are not fp32's best, by up to {lost.max():.4f} of {near:.4f}"
    )
    assert lost.max() < near


@pytest.mark.parametrize("count", [1, 5, 20])
def test_host_proposals_and_other_sequences_change_no_bit(model: Model, count: int) -> None:
    """Up to eight sequences run together, and others join as some end.

    Later, the answers are known.
    """
    prompts = random_prompts(VOCAB, [5 + 37 * i % 190 for i in range(count)])
    requested = every_other_sampled(count, TOKENS)
    alone = [
        outputs(records(model.engine, [prompt], [params], drafter="none"))[0]
        for prompt, params in zip(prompts, requested, strict=True)
    ]
    assert outputs(records(model.engine, prompts, requested, drafter="none")) == alone
    accepted = 0
    for _ in range(2):
        results = records(model.engine, prompts, requested, drafter="suffix")
        assert outputs(results) == alone
        accepted += sum(sum(record.stats.acceptance_histogram[1:]) for record in results)
    assert accepted > 0
