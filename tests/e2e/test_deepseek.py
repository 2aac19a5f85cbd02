"""Engines of DeepSeek-V3 checkpoints against transformers, with and without a draft."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import write_draft
from command_line import Command
from deepseek_checkpoints import HIDDEN, LAYERS, VOCAB, write_deepseek

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.verify import verify_engine
from specbuild.builder.verify.engine_probe import EngineProbe
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt


def built(folder: Path, model: Path, draft: Path | None = None) -> Path:
    options = BuildOptions(
        model=model, draft=draft, output=folder / "engine", limits=LimitOptions(max_seq_len=128)
    )
    build(options, SilentProgress())
    return options.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with every feature (query latents, YaRN, expert groups), a draft, their engine."""
    folder = tmp_path_factory.mktemp("deepseek")
    write_deepseek(folder / "model")
    write_draft(
        folder / "draft", target_layers=LAYERS, target_hidden=HIDDEN, target_vocab=VOCAB,
        draft_vocab=24,
    )  # fmt: skip
    built(folder, folder / "model", folder / "draft")
    return folder


def test_every_stage_and_token_equals_transformers(folder: Path) -> None:
    """Compare stage by stage: prompts, trees and the draft.

    Tokens alone, with chains and with trees.
    """
    report = verify_engine(folder / "engine", folder / "model", folder / "draft", SilentProgress())
    stages = {row.stage: row for row in report.rows}
    assert [stage for stage in stages if stage.startswith("target layer")] == [
        f"target layer.{layer}" for layer in range(LAYERS)
    ]
    assert stages["target logits"].rows == 2 * (24 + 7)
    assert max(row.max_error for row in report.rows) < 1e-4
    assert [row.name for row in report.losslessness] == [
        "greedy: without draft = transformers",
        "greedy: chain of 4 = without draft",
        "greedy: tree of 10 = without draft",
        "sampled: chain of 4 = without draft",
        "sampled: tree of 10 = without draft",
    ]
    assert all(row.tokens > 0 for row in report.losslessness)
    assert report.passed


def test_accepted_tokens_change_no_output(folder: Path) -> None:
    """The draft is random, but some of its tokens are accepted: their cache entries are moved."""
    engine = Engine.load(folder / "engine")
    prompts = [Prompt(id=str(i), prompt_ids=(3 + i, 7, 9)) for i in range(4)]
    params = GenerateParams(max_new_tokens=48, ignore_eos=True)
    outputs, accepted = {}, 0
    for shape in (None, DraftShape(draft_top_k=8, draft_depth=3, draft_tokens=48)):
        for event in engine.generate(prompts, params, speculation=shape):
            if isinstance(event, FinishEvent):
                tokens = event.record.output_ids
                assert outputs.setdefault(event.request, tokens) == tokens
                accepted += sum(event.record.stats.acceptance_histogram[1:])
    assert accepted > 20


def test_inspect_lists_the_features(folder: Path, command: Command) -> None:
    result = command("inspect", folder / "engine")
    assert result.code == 0
    for part in (
        "MLA, 4 heads of 24 + 16 rotated, values of 20",
        "2 layers cache 48 values per token instead of 240",
        "of 96, in 1 of 2 layers",
        "2 in 4 groups",
        "shared experts of 48",
    ):
        assert part in " ".join(result.out.replace("│", " ").split())


def test_a_token_has_one_cache_entry(folder: Path) -> None:
    manifest = json.loads((folder / "engine" / "manifest.json").read_text())
    (group,) = [g for g in manifest["cache_groups"] if g["name"] != "draft"]
    assert group["name"] == "latent" and group["kv_heads"] == 1
    assert group["latent_widths"] == [32 + 16] * LAYERS
    ports = {port["name"] for port in manifest["roles"]["target"]["inputs"]}
    assert {f"latent.{layer}.c_pool" for layer in range(LAYERS)} <= ports
    assert "latent.page_position" not in ports  # keys are rotated once, when they are written


VARIANTS = {
    "no query latent, dense, pairs half apart, bf16": {
        "num_hidden_layers": 1, "q_lora_rank": None, "first_k_dense_replace": 1,
        "rope_interleave": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "dtype": "bfloat16",
    },
    "experts everywhere, wide enough for ONNX Runtime's own op": {
        "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
        "n_routed_experts": 12, "moe_intermediate_size": 48, "n_shared_experts": 1,
        "num_hidden_layers": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_other_variants(name: str, tmp_path: Path) -> None:
    from transformers import DeepseekV3ForCausalLM

    write_deepseek(tmp_path / "model", seed=1, **VARIANTS[name])
    probe = EngineProbe(built(tmp_path, tmp_path / "model"))
    ids = np.random.default_rng(0).integers(0, VOCAB, 45).astype(np.int32)
    with probe.sequence(len(ids)) as sequence:
        parts = [sequence.extend("target", {"token_ids": ids[a:b]}) for a, b in ((0, 33), (33, 45))]
    ours = np.concatenate([part["logits"] for part in parts])
    model = DeepseekV3ForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = model.eval()(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
    assert expected.std() > 0.3
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=1e-4)
