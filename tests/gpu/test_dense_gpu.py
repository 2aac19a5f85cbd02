"""Small random Llamas, Qwen3 and DeepSeeks on a GPU, against transformers and in other batches.

The error of bf16 is measured too, by a bf16 forward of the same checkpoint in transformers. Drafts,
other sequences and chunk boundaries change no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_models import GEOMETRIES, VOCAB, build_dense
from example_engine import (
    CHAIN,
    TREE,
    every_other_sampled,
    on_gpu,
    outputs,
    random_prompts,
    records,
)
from prompt_cuts import cut_at_random
from test_transformers_gpu import Forward, check_choices, check_errors, near_tie, scores

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.request import GenerateParams, Prompt

pytestmark = pytest.mark.timeout(600)

TOKENS = 64
# Prompts of a batch; the longest is split into chunks and has several pages.
LENGTHS = (5, 230, 40, 17)


@dataclass(frozen=True)
class Model:
    """A checkpoint, and its engine on the GPU with a random draft."""

    path: Path
    engine: Engine


@pytest.fixture(scope="module", params=GEOMETRIES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    path, output = build_dense(tmp_path_factory.mktemp("dense"), request.param)
    with on_gpu(output) as engine:
        yield Model(path, engine)


def prompts() -> list[Prompt]:
    return random_prompts(VOCAB, LENGTHS)


def params() -> list[GenerateParams]:
    return every_other_sampled(len(LENGTHS), TOKENS)


def alone(engine: Engine, shape: DraftShape | None) -> list[Any]:
    """Return the record of every prompt alone."""
    return [
        outputs(records(engine, [prompt], [asked], shape))[0]
        for prompt, asked in zip(prompts(), params(), strict=True)
    ]


def forward(path: Path, ids: tuple[int, ...]) -> Forward:
    """Return transformers' logits [T, V] of one sequence, in fp32 and with bf16 parameters."""
    from transformers import AutoModelForCausalLM

    reference_model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    reference_model = reference_model.eval().cuda()
    head = reference_model.get_output_embeddings().weight.data.clone()
    head /= getattr(reference_model.config, "logits_scaling", 1.0)
    cap = getattr(reference_model.config, "final_logit_softcapping", None)

    @torch.no_grad()
    def logits() -> np.ndarray:
        states = reference_model.model(torch.tensor([ids], device="cuda"), use_cache=False)
        made = states.last_hidden_state[0].float() @ head.T
        return (made if cap is None else cap * (made / cap).tanh()).cpu().numpy()

    fp32 = logits()
    # Convert the parameters only: rounded frequencies would give other positions.
    for parameter in reference_model.model.parameters():
        parameter.data = parameter.data.bfloat16()
    return Forward(ids, fp32, logits())


def test_errors_of_scores_and_tokens_are_those_of_bf16(model: Model) -> None:
    """Score with the kernels that verify; then compare tokens of prompt kernels and steps."""
    torch.backends.cuda.matmul.allow_tf32 = False
    greedy = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    (record,) = records(model.engine, prompts()[1:2], greedy, None)
    ids = (*(prompts()[1].prompt_ids or ()), *record.output_ids)
    expected = forward(model.path, ids)
    check_errors(scores(model.engine, expected), expected)
    if model.engine.manifest.target.moe is None:
        # If another expert is selected, also in bf16, every token counts as a near tie.
        check_choices(scores(model.engine, expected), expected)
    rows = np.arange(LENGTHS[1] - 1, len(ids) - 1)
    near, chosen = near_tie(expected), np.array(record.output_ids)
    assert (expected.fp32[rows].max(axis=1) - expected.fp32[rows, chosen]).max() < near
    shifted = expected.fp32[rows] - expected.fp32[rows].max(axis=1, keepdims=True)
    logprobs = shifted[np.arange(len(rows)), chosen] - np.log(np.exp(shifted).sum(axis=1))
    assert np.abs(logprobs - np.array(record.logprobs)).max() < near


def test_tokens_equal_the_cpu_engine_except_for_near_ties(model: Model) -> None:
    output = model.path.parent / "cpu"
    build(
        BuildOptions.from_flat(model=model.path, output=output, backend="cpu", max_seq_len=512),
        SilentProgress(),
    )
    cpu, greedy = Engine.load(output), GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    (actual,) = records(model.engine, prompts()[2:3], greedy, None)
    ids = (*(prompts()[2].prompt_ids or ()), *actual.output_ids)
    desired = np.concatenate([scored.logits for scored in cpu.decoder.score(ids)])
    expected = forward(model.path, ids)
    np.testing.assert_allclose(desired, expected.fp32, atol=1e-2)
    rows = np.arange(LENGTHS[2] - 1, len(ids) - 1)
    lost = desired[rows].max(axis=1) - desired[rows, np.array(actual.output_ids)]
    assert lost.max() < near_tie(expected)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_drafts_and_other_sequences_change_no_bit(model: Model, shape: DraftShape) -> None:
    plain = alone(model.engine, None)
    assert outputs(records(model.engine, prompts(), params(), None)) == plain
    assert alone(model.engine, shape) == plain
    together = records(model.engine, prompts(), params(), shape)
    assert outputs(together) == plain
    accepted = sum(sum(record.stats.acceptance_histogram[1:]) for record in together)
    assert accepted > 0


def test_chunk_boundaries_of_a_long_prompt_change_no_bit(model: Model) -> None:
    assert isinstance(model.engine.executor, CudaExecutor)
    plain = alone(model.engine, None)
    for seed in range(4):
        with cut_at_random(seed, 2 * max(LENGTHS)) as launched:
            together = outputs(records(model.engine, prompts(), params(), None))
        assert together == plain, f"launches of {launched} rows"
