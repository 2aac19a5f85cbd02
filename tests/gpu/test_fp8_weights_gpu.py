"""A small GPT-OSS with fp8 weights on a GPU has the bits of the bf16 engine with equal values.

With these widths, both forms divide K into equal slices. The tests therefore check the decoding of
fp8 in every form of a kernel: steps, verification, prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import edit_tensors
from checkpoints import write_draft, write_target
from example_engine import (
    CHAIN,
    every_other_sampled,
    on_gpu,
    outputs,
    random_prompts,
    records,
)
from mx_rounding import round_checkpoint

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import GenerateParams, Prompt

pytestmark = pytest.mark.timeout(600)

# The vocabulary is so small that some tokens of a random draft are accepted.
VOCAB, LAYERS, HIDDEN, TOKENS = 64, 3, 1024, 48
LENGTHS = (5, 230, 40, 17)
# The fraction of a logit's spread by which bf16 may change the best token.
DOUBT = 0.1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose projections and head fp8 represents exactly, with a draft."""
    folder = tmp_path_factory.mktemp("coded")
    write_target(
        folder / "target", layers=LAYERS, hidden=HIDDEN, q_heads=16, kv_heads=2, head_dim=64,
        experts=8, experts_per_token=4, inner=64, vocab=VOCAB, sliding_window=128,
        max_positions=1024,
    )  # fmt: skip
    edit_tensors(folder / "target", partial(round_checkpoint, name="fp8"))
    write_draft(
        folder / "draft", target_layers=LAYERS, target_hidden=HIDDEN, target_vocab=VOCAB,
        hidden=HIDDEN, inner=320, head_dim=64, draft_vocab=VOCAB, aux_layers=(0, 1, 2),
        max_positions=1024,
    )  # fmt: skip
    return folder


def build_engine(model: Path, name: str, **build_options: Any) -> Path:
    options = BuildOptions.from_flat(
        model=model / "target", output=model / name, max_seq_len=512, **build_options
    )
    build(options, SilentProgress())
    return model / name


def cuda_engine(model: Path, dtype: str) -> Path:
    return build_engine(
        model, dtype, draft=model / "draft", backend="cuda", max_batch_size=4, page_size=64,
        weights_dtype=dtype, **asdict(CHAIN),
    )  # fmt: skip


@pytest.fixture(scope="module")
def exact(model: Path) -> Iterator[Engine]:
    with on_gpu(cuda_engine(model, "bf16")) as engine:
        yield engine


@pytest.fixture(scope="module")
def coded(model: Path) -> Iterator[Engine]:
    with on_gpu(cuda_engine(model, "fp8")) as engine:
        yield engine


def prompts() -> list[Prompt]:
    return random_prompts(VOCAB, LENGTHS)


def params() -> list[GenerateParams]:
    return every_other_sampled(len(LENGTHS), TOKENS)


def test_fp8_weights_need_half_the_bytes(exact: Engine, coded: Engine) -> None:
    plain, tensors = exact.manifest.tensors, coded.manifest.tensors
    names = [name for name in tensors if name.endswith(".packed.fp8")]
    assert coded.manifest.target.dtype == "fp8"
    assert len(names) == 2 * LAYERS + 1
    for name in names:
        wide = plain[name.removesuffix(".fp8")]
        assert prod(tensors[name].shape) < 0.53 * 2 * prod(wide.shape)


@pytest.mark.parametrize("shape", [None, CHAIN], ids=["none", "chain"])
def test_fp8_weights_have_the_bits_of_equal_bf16_weights(
    exact: Engine, coded: Engine, shape: DraftShape | None
) -> None:
    expected = outputs(records(exact, prompts(), params(), shape))
    assert outputs(records(coded, prompts(), params(), shape)) == expected
    for prompt, build_options, of in zip(prompts(), params(), expected, strict=True):
        assert outputs(records(coded, [prompt], [build_options], shape)) == [of]


def test_tokens_agree_with_the_cpu_engine_of_rounded_weights(model: Path, coded: Engine) -> None:
    cpu = Engine.load(build_engine(model, "cpu", weights_dtype="fp8"))
    greedy = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    for prompt, result in zip(prompts(), records(coded, prompts(), greedy, CHAIN), strict=True):
        ids = (*(prompt.prompt_ids or ()), *result.output_ids)
        logits = np.concatenate([rows.logits for rows in cpu.decoder.score(ids)])
        rows = np.arange(len(prompt.prompt_ids or ()) - 1, len(ids) - 1)
        lost = logits[rows].max(axis=1) - logits[rows, np.array(result.output_ids)]
        assert lost.max() < DOUBT * logits[rows].std()
        assert (lost == 0).mean() > 0.9
