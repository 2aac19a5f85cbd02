"""Models with native MLA for CUDA: their fused graphs, interpreted steps, and limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_draft
from deepseek_checkpoints import HIDDEN, LAYERS, VOCAB, write_deepseek
from fused_graphs import (
    PAGE,
    blank_pools,
    fused_model,
    launch_feeds,
    logits_in_chunks,
    require_rounding_only,
    round_weights,
    run_graph,
)
from left_out import slow
from plan_host import PlanHost, lowered_engine

from specbuild.builder.backends.cuda.check import require_cuda_support
from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.tuning.inputs import LaunchData
from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.training.frozen_target import load_target
from specbuild.plugins_cuda.launches import LoweringRequest
from specbuild.plugins_cuda.linear.storage import FP8
from specbuild.runtime.engine_dir.geometry import IndexerGeometry, TargetGeometry
from specbuild.runtime.errors import SpecbuildError

# Widths of kernels: full tiles, and values of 256 as in GLM-4.7-Flash.
SIZES: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}  # fmt: skip
GEOMETRIES: dict[str, dict[str, Any]] = {
    "youtu": {},
    "queries without a latent": {"q_lora_rank": None},
    "wide values, five heads, untied": {
        "v_head_dim": 256, "num_attention_heads": 5, "num_key_value_heads": 5,
        "qk_nope_head_dim": 96, "tie_word_embeddings": False,
    },
    "bf16": {"dtype": "bfloat16"},
    "deepseek_v3": {"kind": "deepseek_v3", "moe_intermediate_size": 32},
    "deepseek_v2": {"kind": "deepseek_v2", "q_lora_rank": None, "moe_intermediate_size": 32},
    "glm4_moe_lite": {"kind": "glm4_moe_lite", "moe_intermediate_size": 64, "v_head_dim": 256},
}  # fmt: skip
QUICK = ("wide values, five heads, untied", "queries without a latent", "deepseek_v2")
TOLERANCE = 0.03  # relative: what bf16 costs a row of logits of transformers, in the middle
ATTENTION = ["RmsLowRank", "Linear", "AbsorbQuery", "MlaAttention", "Linear"]


def write_model(path: Path, **changes: Any) -> None:
    write_deepseek(path, **({"kind": "youtu"} | SIZES | changes))


@pytest.mark.parametrize(
    "name", [*QUICK, *slow(*(name for name in GEOMETRIES if name not in QUICK))]
)
def test_the_fused_graph_equals_transformers(tmp_path: Path, name: str) -> None:
    changes = GEOMETRIES[name]
    write_model(tmp_path, **changes)
    fused = fused_model(tmp_path, max_seq_len=64, max_batch_size=2, page_size=PAGE)
    require_cuda_support(fused.target.geometry, None)
    model = fused.models["target"]
    attention = [op for i, op in enumerate(ATTENTION) if i != 1 or "q_lora_rank" not in changes]
    dense = [*attention, "RmsSwiglu", "Linear"]
    layers = [*dense, *attention, "RmsMoe"] if "kind" in changes else dense * LAYERS
    assert [node.op_type for node in model.graph] == ["Embed", *layers, "RmsHead"]
    reference_model = load_target(tmp_path, teacher=False).float()
    ids = torch.randint(6, VOCAB, (60,), generator=torch.Generator().manual_seed(5))
    require_rounding_only(logits_in_chunks(model, ids), reference_model, ids, tolerance=TOLERANCE)


def test_quantized_weights_equal_rounded_ones(tmp_path: Path) -> None:
    """The low-rank projections are quantized; up-projections of latents are not."""
    write_model(tmp_path, tie_word_embeddings=False)
    logits: dict[str, torch.Tensor] = {}
    for form in ("bf16", FP8.name, "rounded"):
        dtype = "bf16" if form == "rounded" else form
        fused = fused_model(tmp_path, max_seq_len=64, page_size=PAGE, weights_dtype=dtype)
        model = fused.models["target"]
        if form == "rounded":
            round_weights(model, FP8)
        feeds = launch_feeds(model, range(20), torch.arange(20)) | blank_pools(model)
        feeds["token_ids"] = torch.arange(6, 26, dtype=torch.int32)
        logits[form] = run_graph(model, feeds)["logits"]
        coded = [n for n in model.graph.initializers if n.endswith(f".packed.{FP8.name}")]
        assert len(coded) == (5 * LAYERS + 1 if form == FP8.name else 0)
    assert torch.equal(logits[FP8.name], logits["rounded"])
    assert not torch.equal(logits[FP8.name], logits["bf16"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mla") / "target"
    write_model(path, dtype="bfloat16")
    write_draft(
        path.parent / "draft", target_layers=LAYERS, target_hidden=HIDDEN, target_vocab=VOCAB,
        hidden=HIDDEN, draft_vocab=VOCAB,
    )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> LoweredEngine:
    return lowered_engine(
        model, model.parent / "draft", max_seq_len=128, max_batch_size=2, page_size=PAGE,
        draft_top_k=2, draft_depth=3, draft_tokens=5,
    )  # fmt: skip


def prompt(length: int) -> list[int]:
    drawn = torch.randint(6, VOCAB, (length,), generator=torch.Generator().manual_seed(2))
    return [int(token) for token in drawn]


def generated(engine: LoweredEngine, program: str, tokens: int) -> list[int]:
    """Return greedy tokens after the prompt by steps of a program."""
    host = PlanHost(engine)
    first, _ = host.admit(0, prompt(37), tokens)
    return [first, *host.generate(0, program, tokens - 1)]


def test_steps_generate_the_tokens_of_transformers(model: Path, engine: LoweredEngine) -> None:
    """Each token is transformers' best one, or nearly ties with it."""
    tokens = generated(engine, "step@1", 40)
    reference_model = load_target(model, teacher=False).float()
    with torch.no_grad():
        logits = reference_model(torch.tensor([prompt(37) + tokens])).logits[0, 36:-1]
    lost = logits.max(dim=1).values - logits[range(40), tokens]
    assert (lost <= TOLERANCE * logits.abs().max(dim=1).values).all()
    assert (lost == 0).sum() > 35 and len(set(tokens)) > 3


@pytest.mark.parametrize("program", [*slow("draft-1-3-3"), "draft-2-3-5"])
def test_drafts_change_no_token(engine: LoweredEngine, program: str) -> None:
    assert generated(engine, f"step@1.{program}", 40) == generated(engine, "step@1", 40)


def test_a_draft_with_latents_changes_no_token(
    model: Path, engine: LoweredEngine, tmp_path: Path
) -> None:
    write_draft(
        tmp_path, target_layers=LAYERS, target_hidden=HIDDEN, target_vocab=VOCAB, hidden=HIDDEN,
        draft_vocab=VOCAB, latent=SIZES,
    )  # fmt: skip
    drafting = lowered_engine(
        model, tmp_path, max_seq_len=128, max_batch_size=1, page_size=PAGE, draft_top_k=2,
        draft_depth=3, draft_tokens=5,
    )  # fmt: skip
    assert [g.latent_widths for g in drafting.engine_sizes.groups] == [(80, 80), (80,)]
    plain = generated(engine, "step@1", 40)
    for program in ("draft-1-3-3", "draft-2-3-5"):
        assert generated(drafting, f"step@1.{program}", 40) == plain


def test_caches_have_one_entry_a_token(engine: LoweredEngine) -> None:
    (group,) = engine.engine_sizes.target_groups
    assert (group.name, group.latent_widths) == ("latent", (80, 80))
    held = {b.name: b.bytes for b in PlanHost(engine).plan.buffers if b.space == "cache"}
    assert held["cache:latent"] == LAYERS * group.pages * group.page_size * 80 * 2


def test_tune_can_draw_the_launches_of_mla_layers(engine: LoweredEngine) -> None:
    lowered = next(program for entry, program in engine.programs if entry.name == "step@2")
    drawn = set()
    for call in lowered.ir.calls:
        if call.op.name not in ("AbsorbQuery", "MlaAttention", "RmsLowRank"):
            continue
        request = LoweringRequest({n: t.info for n, t in call.tensors.items()}, call.attributes)
        data = LaunchData(request, 16, np.random.default_rng(1))
        for name, array in data.arrays(list(call.inputs)).items():
            if not name.endswith("_pool"):
                assert array.shape == call.inputs[name].shape
        drawn.add(call.op.name)
    assert len(drawn) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nope_dim": 224}, "qk_nope_head_dim is 224, but CUDA kernels support up to 192"),
        ({"nope_dim": 40}, "qk_nope_head_dim is 40, but CUDA kernels need a multiple of 32"),
        ({"rope_dim": 8}, "qk_rope_head_dim is 8, but CUDA kernels need a multiple of 16"),
        ({"kv_lora_rank": 48}, "kv_lora_rank is 48, but CUDA kernels need a multiple of 32"),
        ({"kv_lora_rank": 544}, "kv_lora_rank is 544, but CUDA kernels support up to 512"),
        (
            {"kv_lora_rank": 512, "rope_dim": 80},
            r"kv_lora_rank \+ qk_rope_head_dim is 592, but CUDA kernels support up to 576",
        ),
        ({"q_lora_rank": 24}, "q_lora_rank is 24, but CUDA kernels need a multiple of 32"),
        ({"v_dim": 96}, "v_head_dim is 96, but CUDA kernels support 16, 32, 64, 128, 256"),
    ],
)
def test_rejects_widths_that_kernels_do_not_support(
    model: Path, changes: dict[str, int], message: str
) -> None:
    geometry = geometry_of(model)
    assert geometry.mla is not None
    require_cuda_support(geometry, None)
    with pytest.raises(SpecbuildError, match=message):
        require_cuda_support(replace(geometry, mla=replace(geometry.mla, **changes)), None)


def geometry_of(model: Path) -> TargetGeometry:
    return read_target(model, strict=True).geometry


def test_rejects_indexers_with_native_latents(model: Path) -> None:
    indexer = IndexerGeometry(layers=(0,), heads=2, width=32, weighted=True)
    with pytest.raises(SpecbuildError, match=r"a youtu with indexers \(DSA\).* or --no-dsa"):
        require_cuda_support(replace(geometry_of(model), indexer=indexer), None)
