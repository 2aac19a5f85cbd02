"""Engines of every model type with DeepSeek's attention, against their classes in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_draft
from deepseek_checkpoints import (
    GROUPS_BY_BEST,
    HIDDEN,
    KINDS,
    VOCAB,
    YARN,
    quantise,
    write_deepseek,
)

from specbuild.builder.build import build
from specbuild.builder.families.deepseek.variants import VARIANTS
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.frozen_target import load_target
from specbuild.builder.verify import verify_engine

Case = tuple[str, dict[str, Any]]

QUICK: dict[str, Case] = {
    "Youtu, tied": ("youtu", {"num_hidden_layers": 1}),
    "DeepSeek-V2, groups by their best": (
        "deepseek_v2",
        GROUPS_BY_BEST | {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    ),
    "DeepSeek-V3 in FP8": (
        "deepseek_v3",
        {"num_hidden_layers": 1, "first_k_dense_replace": 0, "fp8": (48, 20)},
    ),
}
SLOW: dict[str, Case] = {
    "GLM-4.7-Flash": ("glm4_moe_lite", {}),
    "GLM, wide values, five layers, shards": (
        "glm4_moe_lite",
        {"num_hidden_layers": 5, "v_head_dim": 40, "dtype": "bfloat16", "shard_size": "60KB"},
    ),
    "GLM, two dense layers, no query latent": (
        "glm4_moe_lite",
        {"num_hidden_layers": 3, "first_k_dense_replace": 2, "q_lora_rank": None},
    ),
    "Youtu as the community calls it": ("youtu_llm", {"dtype": "float16"}),
    "Youtu, untied, no query latent": (
        "youtu", {"tie_word_embeddings": False, "q_lora_rank": None, "num_hidden_layers": 3},
    ),
    "DeepSeek-V2-Lite's routing": ("deepseek_v2", {"dtype": "bfloat16", "shard_size": "60KB"}),
    "DeepSeek-V2, three dense layers of four, plain RoPE": (
        "deepseek_v2",
        {
            "num_hidden_layers": 4, "first_k_dense_replace": 3, "num_attention_heads": 2,
            "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default"},
        },
    ),
    "DeepSeek-V2, wide experts in groups": (
        "deepseek_v2", GROUPS_BY_BEST | {"moe_intermediate_size": 96, "n_group": 2, "topk_group": 1}
    ),
    "Kimi-K2": ("kimi_k2", {"dtype": "bfloat16", "num_attention_heads": 6,
                            "num_key_value_heads": 6}),
    "Kimi-K2 in FP8": ("kimi_k2", {"dtype": "bfloat16", "fp8": (16, 128)}),
    "DeepSeek-V3, YaRN without mscale, fp16": (
        "deepseek_v3",
        {
            "rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k},
            "dtype": "float16", "num_hidden_layers": 3, "first_k_dense_replace": 2,
        },
    ),
}  # fmt: skip


def check(folder: Path, case: Case, *, drafted: bool) -> None:
    """Build the case's model, and compare every stage and every token."""
    kind, changes = case
    changes = dict(changes)
    block = changes.pop("fp8", None)
    write_deepseek(folder / "model", kind=kind, **changes)
    if block is not None:
        quantise(folder / "model", block)
    draft = None
    if drafted:
        draft = folder / "draft"
        layers = changes.get("num_hidden_layers", 2)
        write_draft(
            draft, target_layers=layers, target_hidden=HIDDEN, target_vocab=VOCAB, draft_vocab=24
        )
    engine = folder / "engine"
    limits = LimitOptions(max_seq_len=128)
    options = BuildOptions(model=folder / "model", draft=draft, output=engine, limits=limits)
    build(options, SilentProgress())
    assert json.loads((engine / "manifest.json").read_text())["target"]["model_type"] == kind
    report = verify_engine(engine, folder / "model", draft, SilentProgress())
    assert max(row.max_error for row in report.rows) < 1e-4
    assert len(report.losslessness) == (5 if drafted else 1)
    assert all(row.tokens > 0 for row in report.losslessness)
    assert report.passed


@pytest.mark.parametrize("name", QUICK)
def test_every_stage_and_token_equals_transformers(name: str, tmp_path: Path) -> None:
    check(tmp_path, QUICK[name], drafted=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_other_geometries(name: str, tmp_path: Path) -> None:
    check(tmp_path, SLOW[name], drafted=True)


def test_every_model_type_has_its_own_checkpoint_writer() -> None:
    assert set(KINDS) == set(VARIANTS)
    for kind, (name, _) in KINDS.items():
        assert VARIANTS[kind].architecture == f"{name}ForCausalLM"


def test_the_embedding_of_the_padding_token_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """transformers sets it to zero, and with it the token's column of a tied head."""
    from transformers import YoutuForCausalLM

    write_deepseek(tmp_path, kind="youtu", num_hidden_layers=1)
    assert json.loads((tmp_path / "config.json").read_text())["pad_token_id"] == 5
    plain = YoutuForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    loaded = load_target(tmp_path, teacher=False)
    rows = plain.model.embed_tokens.weight, loaded.get_input_embeddings().weight
    assert not rows[0][5].any() and rows[1][5].any()
    assert torch.equal(rows[0][6:], rows[1][6:])
