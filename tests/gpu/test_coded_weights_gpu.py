"""A small GPT-OSS with fp8 weights on a GPU: bit for bit the bf16 engine of the values they hold.

Its widths are those for which both forms cut K into the same slices. What is left is decoding
codes, in every form of a kernel: steps, verification, prompts.
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

# So few tokens that a random draft is right now and then.
VOCAB, LAYERS, HIDDEN, TOKENS = 64, 3, 1024, 48
LENGTHS = (5, 230, 40, 17)
# The share of a logit's spread that bf16 may cost the likeliest token.
DOUBT = 0.1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose projections and head fp8 holds as they are, with a draft beside it."""
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


def build_engine(model: Path, name: str, **asked: Any) -> Path:
    options = BuildOptions.from_flat(
        model=model / "target", output=model / name, max_seq_len=512, **asked
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


def test_codes_take_half_the_bytes(exact: Engine, coded: Engine) -> None:
    plain, tensors = exact.manifest.tensors, coded.manifest.tensors
    names = [name for name in tensors if name.endswith(".packed.fp8")]
    assert coded.manifest.target.dtype == "fp8"
    assert len(names) == 2 * LAYERS + 1
    for name in names:
        wide = plain[name.removesuffix(".fp8")]
        assert prod(tensors[name].shape) < 0.53 * 2 * prod(wide.shape)


@pytest.mark.parametrize("shape", [None, CHAIN], ids=["none", "chain"])
def test_no_bit_differs_from_weights_of_their_values(
    exact: Engine, coded: Engine, shape: DraftShape | None
) -> None:
    wanted = outputs(records(exact, prompts(), params(), shape))
    assert outputs(records(coded, prompts(), params(), shape)) == wanted
    for prompt, asked, of in zip(prompts(), params(), wanted, strict=True):
        assert outputs(records(coded, [prompt], [asked], shape)) == [of]


def test_the_cpu_engine_of_rounded_weights_agrees(model: Path, coded: Engine) -> None:
    cpu = Engine.load(build_engine(model, "cpu", weights_dtype="fp8"))
    greedy = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    for prompt, found in zip(prompts(), records(coded, prompts(), greedy, CHAIN), strict=True):
        ids = (*(prompt.prompt_ids or ()), *found.output_ids)
        logits = np.concatenate([rows.logits for rows in cpu.decoder.score(ids)])
        rows = np.arange(len(prompt.prompt_ids or ()) - 1, len(ids) - 1)
        lost = logits[rows].max(axis=1) - logits[rows, np.array(found.output_ids)]
        assert lost.max() < DOUBT * logits[rows].std()
        assert (lost == 0).mean() > 0.9
