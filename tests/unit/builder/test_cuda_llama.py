"""Dense Llamas and Qwen3 for CUDA: results of their fused graphs, and their compilation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from checkpoint_files import edit_tensors
from checkpoints import write_draft
from fused_graphs import (
    PAGE,
    blank_pools,
    fused_model,
    launch_feeds,
    logits_in_chunks,
    relative_error,
    require_rounding_only,
    round_weights,
    run_graph,
)
from left_out import slow
from llama_checkpoints import LAYERS, write_llama
from transformers import AutoModelForCausalLM

from specbuild.builder.backends.cuda.backend import CUDA
from specbuild.builder.backends.cuda.check import require_cuda_support
from specbuild.builder.build import build
from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.inputs import read_checkpoints, settled_inputs
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.plugins_cuda.linear.block_scaled import mxfp4_blocks
from specbuild.plugins_cuda.linear.storage import FP8, MXFP4, Storage
from specbuild.plugins_cuda.moe.expert_weight import expert_weight
from specbuild.runtime.engine_dir.features import used_features
from specbuild.runtime.engine_dir.files import read_manifest, verify_files
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.check import read_plan

SIZES: dict[str, Any] = {"dtype": "bfloat16"}
LAYER = ["RmsQkvRope", "PagedTreeAttention", "Linear", "RmsSwiglu", "Linear"]
# Norms of the results of attention and feed-forward, before they are added to the stream.
_NORMED = [*LAYER[:3], "DraftInput", *LAYER[3:], "DraftInput"]
LAYER_OF = dict.fromkeys(("olmo2", "olmo3", "gemma3_text", "gemma4_text"), _NORMED)
# With experts and a feed-forward, each result is normed before both are added.
LAYER_OF["gemma4 with experts"] = [*_NORMED[:6], "RmsMoe", *["DraftInput"] * 3]
# Small models with sizes that kernels support.
GEOMETRIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied llama": ("llama", {"tie_word_embeddings": True, "dtype": "bfloat16"}),
    "biased llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear rope": ("llama", {"rope_parameters": {
        "rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
    "one KV head of 8": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1,
                                   "head_dim": 64, "rope_parameters": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "phi3": ("phi3", {}),
    "mistral": ("mistral", {"head_dim": 16}),
    "ministral3": ("ministral3", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 24,
        "llama_4_scaling_beta": 0.5}}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3}),
    "partial phi3": ("phi3", {"head_dim": 32, "num_attention_heads": 2, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "granite": ("granite", {"tie_word_embeddings": True, "vocab_size": 37}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"num_hidden_layers": 3}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 3, "layer_types": [
        "sliding_attention", "sliding_attention", "full_attention"]}),
    "gemma4": ("gemma4_text", {"num_hidden_layers": 3, "num_global_key_value_heads": 1,
                               "global_head_dim": 32, "layer_types": [
        "sliding_attention", "sliding_attention", "full_attention"]}),
    "gemma4 with experts": ("gemma4_text", {
        "num_hidden_layers": 3, "enable_moe_block": True, "layer_types": [
            "sliding_attention", "sliding_attention", "full_attention"],
                            "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}),
    "biased qwen3": ("qwen3", {"head_dim": 128, "attention_bias": True}),
}  # fmt: skip
QUICK = ("one KV head of 8", "qwen2", "biased qwen3")
TOLERANCE = 0.03  # relative: what bf16 costs a row of logits of transformers, in the middle
# With routers of three layers, some rows nearly tie.
TOLERANCES = {"gemma4 with experts": 0.05}


@pytest.mark.parametrize(
    "name", [*QUICK, *slow(*(name for name in GEOMETRIES if name not in QUICK))]
)
def test_the_fused_graph_equals_transformers(tmp_path: Path, name: str) -> None:
    kind, changes = GEOMETRIES[name]
    write_llama(tmp_path, kind, **changes)
    fused = fused_model(tmp_path, max_seq_len=64, max_batch_size=2, page_size=PAGE)
    require_cuda_support(fused.target.geometry, None)
    model = fused.models["target"]
    ops = [node.op_type for node in model.graph]
    layer = LAYER_OF.get(name) or LAYER_OF.get(kind, LAYER)
    assert ops == ["Embed", *layer * LAYERS, "RmsHead"]
    reference_model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(3, 32, (60,), generator=torch.Generator().manual_seed(5))
    tolerance = TOLERANCES.get(name, TOLERANCE)
    require_rounding_only(logits_in_chunks(model, ids), reference_model, ids, tolerance=tolerance)


def test_layers_share_caches_and_have_separate_embeddings(tmp_path: Path) -> None:
    """One lookup, projection and norm serve all layers; two layers read the caches of others."""
    layer_types = ["sliding_attention", "sliding_attention", "full_attention"]
    write_llama(
        tmp_path, "gemma4_text", num_hidden_layers=5, num_kv_shared_layers=2,
        layer_types=[*layer_types, *layer_types[1:]], attention_k_eq_v=False,
        num_global_key_value_heads=None, hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=32, use_double_wide_mlp=True,
    )  # fmt: skip
    fused = fused_model(tmp_path, max_seq_len=64, max_batch_size=2, page_size=PAGE)
    require_cuda_support(fused.target.geometry, None)
    model = fused.models["target"]
    layer = [*_NORMED, "Linear", "SigmoidGate", "Linear", "DraftInput"]
    ops = [node.op_type for node in model.graph]
    assert ops == ["Embed", "Embed", "Linear", "DraftInput", *layer * 5, "RmsHead"]
    projections = [node for node in model.graph if node.op_type == "RmsQkvRope"]
    assert [node.attributes["kv_heads"].value for node in projections] == [2, 2, 2, 0, 0]
    reference_model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(3, 32, (60,), generator=torch.Generator().manual_seed(5))
    require_rounding_only(logits_in_chunks(model, ids), reference_model, ids, tolerance=TOLERANCE)


@pytest.mark.parametrize(("width", "is_part"), [(32, True), (96, False)])
def test_a_gated_shared_expert_of_equal_width_is_part_of_the_experts(
    tmp_path: Path, width: int, is_part: bool
) -> None:
    write_llama(
        tmp_path, "qwen3_5_moe_text", linear_key_head_dim=16, linear_value_head_dim=16,
        moe_intermediate_size=32, shared_expert_intermediate_size=width,
    )  # fmt: skip
    fused = fused_model(tmp_path, max_seq_len=64, max_batch_size=2, page_size=PAGE)
    require_cuda_support(fused.target.geometry, None)
    nodes = list(fused.models["target"].graph)
    experts = [node for node in nodes if node.op_type == "RmsMoe"]
    assert len(experts) == fused.target.geometry.layers
    for node in experts:
        assert [node.attributes[name].value for name in ("shared", "shared_gates")] == [is_part] * 2
    assert any(node.op_type == "RmsSwiglu" for node in nodes) != is_part


@pytest.mark.parametrize(("kind", "changes"), [
    ("glm4_moe", {"moe_intermediate_size": 32, "use_qk_norm": True}),
    ("minimax_m2", {"head_dim": 32, "intermediate_size": 32, "num_local_experts": 16}),
])  # fmt: skip
def test_partial_rotation_of_heads_with_experts(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    """Queries and keys are normed per head, or over all heads."""
    write_llama(tmp_path, kind, **changes, dtype="bfloat16")
    fused = fused_model(tmp_path, max_seq_len=64, max_batch_size=2, page_size=PAGE)
    require_cuda_support(fused.target.geometry, None)
    model = fused.models["target"]
    attention, dense = LAYER[:3], LAYER[3:] if kind == "glm4_moe" else ["RmsMoe"]
    layers = [*attention, *dense, *([*attention, "RmsMoe"] * (LAYERS - 1))]
    assert [node.op_type for node in model.graph] == ["Embed", *layers, "RmsHead"]
    reference_model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(3, 32, (60,), generator=torch.Generator().manual_seed(5))
    require_rounding_only(logits_in_chunks(model, ids), reference_model, ids, tolerance=TOLERANCE)


@pytest.mark.parametrize("storage", [FP8, MXFP4], ids=lambda storage: storage.name)
def test_quantized_weights_equal_rounded_ones(tmp_path: Path, storage: Storage) -> None:
    """All projections and the head are quantized.

    Bf16 weights with their values give equal results.
    """
    write_llama(tmp_path, "qwen3", head_dim=32, num_hidden_layers=2)
    logits: dict[str, torch.Tensor] = {}
    for form in ("bf16", storage.name, "rounded"):
        dtype = "bf16" if form == "rounded" else form
        fused = fused_model(tmp_path, max_seq_len=64, page_size=PAGE, weights_dtype=dtype)
        model = fused.models["target"]
        if form == "rounded":
            round_weights(model, storage)
        feeds = launch_feeds(model, range(20), torch.arange(20)) | blank_pools(model)
        feeds["token_ids"] = torch.arange(3, 23, dtype=torch.int32)
        logits[form] = run_graph(model, feeds)["logits"]
        coded = [n for n in model.graph.initializers if n.endswith(f".packed.{storage.name}")]
        assert len(coded) == (4 * 2 + 1 if form == storage.name else 0)
    assert torch.equal(logits[storage.name], logits["rounded"])
    assert relative_error(logits[storage.name], logits["bf16"]).median() < 0.5
    assert not torch.equal(logits[storage.name], logits["bf16"])


@pytest.mark.parametrize("coded", [False, True], ids=["bf16", "mxfp4"])
def test_experts_equal_transformers(tmp_path: Path, coded: bool) -> None:
    """Experts are unchanged, or in MXFP4 with values that MXFP4 represents exactly."""
    sizes = {"head_dim": 16, "num_hidden_layers": 2, "moe_intermediate_size": 32}
    write_llama(tmp_path, "qwen3_moe", dtype="bfloat16", **sizes)

    def rounded(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("_proj.weight") or n == "lm_head.weight"]:
            blocks, scales = mxfp4_blocks(tensors[name][None])
            tensors[name] = expert_weight(blocks, scales)[0].T.contiguous().bfloat16()

    options: dict[str, Any] = {"max_seq_len": 64, "page_size": PAGE}
    options |= {"weights_dtype": "mxfp4"} if coded else {}
    fused = fused_model(tmp_path, **options)
    require_cuda_support(fused.target.geometry, None)
    model = fused.models["target"]
    layer = ["RmsQkvRope", "PagedTreeAttention", "Linear", "RmsMoe"]
    assert [node.op_type for node in model.graph] == ["Embed", *layer * 2, "RmsHead"]
    feeds = launch_feeds(model, range(20), torch.arange(20)) | blank_pools(model)
    feeds["token_ids"] = torch.arange(3, 23, dtype=torch.int32)
    logits = run_graph(model, feeds)["logits"]
    if coded:
        edit_tensors(tmp_path, rounded)
        again = fused_model(tmp_path, **options).models["target"]
        assert torch.equal(run_graph(again, feeds)["logits"], logits)
    reference_model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference_model(torch.arange(3, 23)[None]).logits[0]
    # If a row's router nearly ties, another expert may be selected.
    assert relative_error(logits, expected).median() < 2 * TOLERANCE


def test_models_of_dense_and_routed_layers(tmp_path: Path) -> None:
    """The weights of experts come from a softmax over all of them."""
    sizes = {"head_dim": 16, "num_hidden_layers": 2, "moe_intermediate_size": 32}
    write_llama(
        tmp_path, "qwen3_moe", dtype="bfloat16", mlp_only_layers=[0], norm_topk_prob=False, **sizes
    )
    fused = fused_model(tmp_path, max_seq_len=64, page_size=PAGE)
    require_cuda_support(fused.target.geometry, None)
    model = fused.models["target"]
    routed = ["RmsQkvRope", "PagedTreeAttention", "Linear", "RmsMoe"]
    assert [node.op_type for node in model.graph] == ["Embed", *LAYER, *routed, "RmsHead"]
    feeds = launch_feeds(model, range(20), torch.arange(20)) | blank_pools(model)
    feeds["token_ids"] = torch.arange(3, 23, dtype=torch.int32)
    reference_model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference_model(torch.arange(3, 23)[None]).logits[0]
    assert relative_error(run_graph(model, feeds)["logits"], expected).median() < 2 * TOLERANCE


def test_weights_are_quantized_with_a_draft(tmp_path: Path) -> None:
    """The draft's input is concatenated, so other nodes surround the multiplications."""
    write_llama(tmp_path / "model", "qwen3_moe", head_dim=16, moe_intermediate_size=32)
    write_draft(
        tmp_path / "draft", target_layers=LAYERS, target_hidden=64, target_vocab=32, hidden=64,
        draft_vocab=32, aux_layers=(0, 1, 2), norm_before_fc=True, norm_output=True,
    )  # fmt: skip
    fused = fused_model(
        tmp_path / "model", tmp_path / "draft", max_seq_len=64, page_size=PAGE,
        weights_dtype="mxfp4", draft_dtype="fp8",
    )  # fmt: skip
    multiply = {"Linear", "RmsQkvRope", "RmsSwiglu", "RmsMoe", "RmsHead"}
    for model in fused.models.values():
        assert {node.op_type for node in model.graph} - multiply
        for node in [node for node in model.graph if node.op_type in multiply]:
            dtypes = [value.dtype for value in node.inputs if value is not None]
            assert ir.DataType.UINT8 in dtypes, node.op_type


def test_rejects_experts_that_kernels_do_not_support(tmp_path: Path) -> None:
    write_llama(tmp_path, "qwen3_moe", head_dim=16, moe_intermediate_size=32)
    geometry = read_target(tmp_path, strict=True).geometry
    moe = geometry.moe
    assert moe is not None
    require_cuda_support(replace(geometry, dtype="mxfp4"), None)
    with pytest.raises(SpecbuildError, match="--weights-dtype fp8: the model has experts"):
        require_cuda_support(replace(geometry, dtype="fp8"), None)
    for changes, message in (
        ({"experts": 640}, "top 3 of 640 experts, its CUDA kernels know 1 to 10 of up to 512"),
        ({"choice_bias": True}, "gating 'softmax_selected' with a choice bias, .* know sigmoid, "),
        (
            {"inner": 24},
            "intermediate_size of experts is 24, but CUDA kernels need a multiple of 32",
        ),
    ):
        other = (*geometry.feed_forwards, replace(moe, **changes))
        with pytest.raises(SpecbuildError, match=message):
            require_cuda_support(replace(geometry, feed_forwards=other), None)


def test_an_engine_reports_quantized_weights(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", "llama", num_hidden_layers=1, dtype="bfloat16")
    options = BuildOptions.from_flat(
        model=tmp_path / "model", output=tmp_path / "engine", backend="cuda", gpu="sm_90a",
        max_seq_len=64, max_batch_size=1, page_size=16, weights_dtype="fp8",
    )  # fmt: skip
    inputs = settled_inputs(options, CUDA, read_checkpoints(options, SilentProgress()))
    assert inputs.target.geometry.dtype == "fp8"
    assert any("rounded to fp8" in warning for warning in inputs.target.warnings)
    assert used_features(inputs.target.geometry) == ("coded_weights",)
    plain = replace(options, kernels=replace(options.kernels, weights_dtype="bf16"))
    inputs = settled_inputs(plain, CUDA, read_checkpoints(plain, SilentProgress()))
    assert inputs.target.geometry.dtype is None and not inputs.target.warnings


# The options of a draft in addition to the target's geometry.
DRAFTS: dict[str, dict[str, Any]] = {
    "llama": {"norm_before_fc": True, "norm_output": True},
    "tied llama": {"norm_before_fc": True},
    "biased qwen3": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
}


@pytest.mark.parametrize(
    ("name", "drafted"),
    [("tied llama", False), *[
        pytest.param(name, drafted, marks=pytest.mark.slow)
        for name, drafted in (("llama", True), ("tied llama", True), ("biased qwen3", True),
                              ("biased llama", False), ("qwen3", False), ("qwen3_moe", False))
    ]],
)  # fmt: skip
def test_kernels_of_the_engine_compile(tmp_path: Path, name: str, drafted: bool) -> None:
    kind, changes = GEOMETRIES.get(name, ("qwen3_moe", {"moe_intermediate_size": 32}))
    coded = "mxfp4" if kind == "qwen3_moe" else None
    sizes = SIZES | {"num_hidden_layers": 2} | changes
    write_llama(tmp_path / "model", kind, **sizes)
    draft = tmp_path / "draft"
    if drafted:
        write_draft(
            draft, target_layers=2, target_hidden=64, target_vocab=32, hidden=64, draft_vocab=32,
            aux_layers=(0, 1), **DRAFTS[name],
        )  # fmt: skip
    options = BuildOptions.from_flat(
        model=tmp_path / "model", draft=draft if drafted else None, output=tmp_path / "engine",
        backend="cuda", gpu="sm_90a", max_seq_len=64, max_batch_size=1, page_size=16,
        weights_dtype=coded,
    )  # fmt: skip
    report = build(options, SilentProgress())
    assert report.cuda is not None
    manifest = read_manifest(options.output)
    assert (manifest.draft is not None) == drafted
    plan = read_plan(options.output, manifest)
    entries = {kernel.entry for kernel in plan.kernels}
    assert ("rms_qkv_rope_heads" in entries) == (kind != "llama")
    # No norm is a separate launch, except the draft's before fc and its output's.
    assert ("draft_input" in entries) == drafted
    verify_files(options.output, manifest)
