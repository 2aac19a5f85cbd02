"""MLA on a GPU with prefixes, host proposals, quantized weights, and drafts with MLA.

``test_dense_gpu.py`` compares such models with transformers, and their bits alone and in batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_draft
from deepseek_checkpoints import LAYERS, add_predictor, write_deepseek
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

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.settings import RuntimeSettings

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
def test_a_cached_prefix_has_the_bits_of_a_cold_run(
    directory: Path, engine: Engine, shape: DraftShape | None
) -> None:
    ids = np.random.default_rng(3).integers(3, VOCAB, 400).tolist()
    prompts = [Prompt("whole", tuple(ids)), Prompt("part", (*ids[:200], *ids[300:350]))]
    asked = every_other_sampled(2, TOKENS)
    pairs = list(zip(prompts, asked, strict=True))
    cold = [outputs(records(engine, [prompt], [of], shape))[0] for prompt, of in pairs]
    with on_gpu(directory, RuntimeSettings(prefix_caching="on")) as caching:
        for prefix in ((0, 192), (384, 192)):
            result = [records(caching, [prompt], [of], shape)[0] for prompt, of in pairs]
            assert outputs(result) == cold
            assert tuple(record.stats.cached_tokens for record in result) == prefix


def test_host_proposals_change_no_bit(engine: Engine) -> None:
    prompts, asked = random_prompts(VOCAB, LENGTHS), every_other_sampled(len(LENGTHS), TOKENS)
    plain = outputs(records(engine, prompts, asked, drafter="none"))
    # From the second run on, the answers are known.
    steps = []
    for _ in range(2):
        made = records(engine, prompts, asked, drafter="suffix")
        assert outputs(made) == plain
        steps.append(sum(record.stats.steps for record in made))
    assert steps[1] < 0.7 * len(LENGTHS) * TOKENS


@pytest.mark.parametrize("dtype", ["fp8", "mxfp4"])
def test_drafts_change_no_bit_with_quantized_projections(tmp_path: Path, dtype: str) -> None:
    _, output = build_dense(tmp_path, "youtu", weights_dtype=dtype)
    prompts = random_prompts(VOCAB, LENGTHS)
    greedy = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    with on_gpu(output) as coded:
        alone = [outputs(records(coded, [prompt], greedy, None))[0] for prompt in prompts]
        assert outputs(records(coded, prompts, greedy, None)) == alone
        assert outputs(records(coded, prompts, greedy, TREE)) == alone


LATENTS = {
    "q_lora_rank": 256, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_drafts_with_latents_change_no_bit(tmp_path: Path, kind: str) -> None:
    """DeepSeek-V3's attention with dense layers, and an MTP layer or EAGLE3 draft with MLA."""
    path, draft = tmp_path / "model", Path("mtp")
    sizes = {**LATENTS, "hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 16}
    write_deepseek(path, dtype="bfloat16", first_k_dense_replace=LAYERS + 1, **sizes)
    add_predictor(path)
    if kind == "eagle3":
        draft = tmp_path / "draft"
        write_draft(
            draft, target_layers=LAYERS, target_hidden=512, target_vocab=VOCAB, hidden=512,
            draft_vocab=VOCAB, aux_layers=(0, 1), max_positions=512, q_heads=16, latent=LATENTS,
        )  # fmt: skip
    options = BuildOptions.from_flat(
        model=path, draft=draft, output=tmp_path / "engine", backend="cuda", max_seq_len=512,
        max_batch_size=4, **asdict(TREE),
    )  # fmt: skip
    build(options, SilentProgress())
    prompts, asked = random_prompts(VOCAB, LENGTHS), every_other_sampled(len(LENGTHS), TOKENS)
    with on_gpu(options.output) as engine:
        plain = outputs(records(engine, prompts, asked, None))
        for shape in (CHAIN, TREE):
            made = records(engine, prompts, asked, shape)
            assert outputs(made) == plain
            assert sum(sum(record.stats.acceptance_histogram[1:]) for record in made) > 0
