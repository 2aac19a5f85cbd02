"""Families with grouped-query attention from checkpoint to tokens, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import edit_config
from checkpoints import write_draft
from deepseek_checkpoints import quantise
from family_engines import build_drafted, build_engine, check_stages, check_tokens
from llama_checkpoints import HIDDEN, LAYERS, VOCAB, write_llama
from safetensors.torch import load_file, save_file

from specbuild.builder.families.checkpoints import read_target

GEMMA4_EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24,
}  # fmt: skip
GEMMA4_SHARED: dict[str, Any] = {
    "attention_k_eq_v": False, "num_global_key_value_heads": None, "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
# All sequences are longer than their original context.
LONG_FACTORS: dict[str, Any] = {
    "original_max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8, "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.5]},
}  # fmt: skip
QUICK: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral with a window": ("mistral", {"sliding_window": 12, "tie_word_embeddings": True}),
    "Ministral 3": ("ministral3", {}),
    "Mixtral": ("mixtral", {"num_hidden_layers": 2}),
    "SmolLM3": ("smollm3", {"tie_word_embeddings": True}),
    "Phi-4": ("phi3", {"num_hidden_layers": 2}),
    "OLMo 3": ("olmo3", {}),
    "Granite": ("granite", {}),
    "GLM-4.5": ("glm4_moe", {}),
    "Gemma 3": ("gemma3_text", {"query_pre_attn_scalar": 20}),
    "Gemma 4": ("gemma4_text", {}),
    "Gemma 4 with experts": ("gemma4_text", GEMMA4_EXPERTS),
    "Gemma 4 with shared caches and inputs of layers": ("gemma4_text", GEMMA4_SHARED),
    "MiniMax-M2": ("minimax_m2", {"num_hidden_layers": 2}),
    "Qwen3.5": ("qwen3_5_text", {}),
    "Qwen3.5 with experts": ("qwen3_5_moe_text", {"num_hidden_layers": 2, "layer_types": [
        "linear_attention", "full_attention"]}),
    "Qwen3-Next": ("qwen3_next", {"num_hidden_layers": 2, "layer_types": [
        "linear_attention", "full_attention"]}),
}  # fmt: skip
SLOW: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM3 with windows where it does not turn": ("smollm3", {
        "use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [1, 0, 0],
        "num_hidden_layers": 3}),
    "Phi-3 with a window, a part of each head turns": ("phi3", {
        "sliding_window": 9, "shards": 2, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                            "partial_rotary_factor": 0.75}}),
    "GLM-4.6, groups of experts": ("glm4_moe", {
        "use_qk_norm": True, "first_k_dense_replace": 2, "n_group": 4, "topk_group": 2,
        "num_hidden_layers": 4, "norm_topk_prob": False, "dtype": "bfloat16"}),
    "MiniMax-M2, whole heads turn": ("minimax_m2", {"dtype": "bfloat16", "rope_parameters": None}),
    "Gemma 3, scaled, untied": ("gemma3_text", {
        "dtype": "bfloat16", "tie_word_embeddings": False, "sliding_window_pattern": 2,
        "layer_types": None, "num_hidden_layers": 3, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}}),
    "Phi-3 with long factors": ("phi3", LONG_FACTORS),
    "Phi-4-mini with short factors, a part of each head turns": ("phi3", {
        "tie_word_embeddings": True, "rope_parameters": {
            **LONG_FACTORS["rope_parameters"], "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.6], "long_factor": [1.0, 2, 3, 4, 5, 6],
            "original_max_position_embeddings": 256}}),
    "Llama with a dynamic theta": ("llama", {
        "max_position_embeddings": 128, "rope_parameters": {
            "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
    "Gemma 4 12B": ("gemma4_unified_text", {"dtype": "bfloat16"}),
    "Gemma 4 with everything": ("gemma4_text", GEMMA4_EXPERTS | {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4, "dtype": "bfloat16",
        "vocab_size_per_layer_input": VOCAB, "tie_word_embeddings": False,
        "final_logit_softcapping": None}),
    "OLMo 2": ("olmo2", {"dtype": "bfloat16", "attention_bias": True}),
    "OLMo 3 without scaling": ("olmo3", {"rope_parameters": None, "num_hidden_layers": 5}),
    "Granite with biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "Qwen3.5, tied, more value heads": ("qwen3_5_text", {
        "dtype": "bfloat16", "tie_word_embeddings": True, "linear_num_value_heads": 6,
        "linear_key_head_dim": 16, "linear_conv_kernel_dim": 3, "layer_types": [
            "full_attention", "linear_attention", "linear_attention", "full_attention"]}),
    "Qwen3-Next with dense layers": ("qwen3_next", {
        "dtype": "bfloat16", "mlp_only_layers": [1], "norm_topk_prob": False}),
    "Mistral": ("mistral", {"dtype": "bfloat16", "shards": 2}),
    "Mistral of its default head size": ("mistral", {"head_dim": None}),
    "Ministral 3 without growth": ("ministral3", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 32,
        "llama_4_scaling_beta": 0.0}}),
    "Mixtral with a window": ("mixtral", {"sliding_window": 9, "dtype": "bfloat16"}),
    "Qwen2 with windows in its last layers": ("qwen2", {
        "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
    "Qwen3 with windows": ("qwen3", {
        "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
}  # fmt: skip


@pytest.mark.parametrize("case", QUICK)
def test_every_token_and_stage_equals_transformers(tmp_path: Path, case: str) -> None:
    build_drafted(tmp_path, *QUICK[case])
    check_tokens(tmp_path)
    check_stages(tmp_path)


@pytest.mark.slow
def test_a_dynamic_theta_is_computed_for_the_longest_sequence(tmp_path: Path) -> None:
    """transformers changes it with each token after the original context: compare stages."""
    build_drafted(tmp_path, "llama", {"max_position_embeddings": 32, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}})  # fmt: skip
    check_stages(tmp_path)


@pytest.mark.slow
def test_the_released_format_of_minimax(tmp_path: Path) -> None:
    """The checkpoint is in FP8, and has ``rotary_dim``, which transformers ignores."""
    model = tmp_path / "model"
    write_llama(model, "minimax_m2", dtype="bfloat16")
    edit_config(model, rope_parameters=None, rope_theta=10000.0, rotary_dim=8)
    quantise(model, (24, 20))
    write_draft(
        tmp_path / "draft", target_layers=LAYERS, target_hidden=HIDDEN, target_vocab=VOCAB,
        hidden=HIDDEN, draft_vocab=24, aux_layers=(0,),
    )  # fmt: skip
    assert read_target(model, strict=True).geometry.rope.width == 8
    build_engine(tmp_path)
    check_stages(tmp_path)


@pytest.mark.slow
def test_the_released_format_of_qwen(tmp_path: Path) -> None:
    """The experts of a layer are in one tensor, which transformers reads too."""
    model = tmp_path / "model"
    types = ["linear_attention", "full_attention"]
    write_llama(model, "qwen3_5_moe_text", num_hidden_layers=2, layer_types=types)
    fuse_experts(model, layers=2, experts=8)
    write_draft(
        tmp_path / "draft", target_layers=2, target_hidden=HIDDEN, target_vocab=VOCAB,
        hidden=HIDDEN, draft_vocab=24, aux_layers=(0,),
    )  # fmt: skip
    build_engine(tmp_path)
    check_tokens(tmp_path)
    check_stages(tmp_path)


def fuse_experts(model: Path, *, layers: int, experts: int) -> None:
    """Rewrite a checkpoint: gates and ups in one tensor [E, 2I, H], and downs [E, H, I]."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    for layer in range(layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        gates, ups, downs = (
            [tensors.pop(f"{prefix}{expert}.{part}_proj.weight") for expert in range(experts)]
            for part in ("gate", "up", "down")
        )
        tensors[f"{prefix}gate_up_proj"] = torch.cat([torch.stack(gates), torch.stack(ups)], 1)
        tensors[f"{prefix}down_proj"] = torch.stack(downs)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_other_sizes(tmp_path: Path, case: str) -> None:
    build_drafted(tmp_path, *SLOW[case])
    check_tokens(tmp_path)
    check_stages(tmp_path)
