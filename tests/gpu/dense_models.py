"""Small random Llamas, DeepSeeks and related models with random EAGLE3 drafts, built for CUDA."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import edit_tensors
from checkpoints import write_draft
from deepseek_checkpoints import KINDS as DEEPSEEK_KINDS
from deepseek_checkpoints import write_deepseek
from example_engine import TREE
from llama_checkpoints import write_llama

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.plugins_cuda.linear.block_scaled import mxfp4_blocks
from specbuild.plugins_cuda.moe.expert_weight import expert_weight

# The vocabulary is so small that some tokens of a random draft are accepted.
VOCAB, LAYERS = 32, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 544, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024, "dtype": "bfloat16",
}  # fmt: skip
# Fields of all models with MLA. transformers would set the row of a padding token to zero.
_LATENTS: dict[str, Any] = {
    "hidden_size": 512, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "pad_token_id": None,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1,
}  # fmt: skip
# One layer in three has keys and values; the others have a recurrent state.
_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}  # fmt: skip
_HYBRID_EXPERTS: dict[str, Any] = {
    **_HYBRID, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}  # fmt: skip
# Two layers in three have a window.
_LOCAL_AND_GLOBAL: dict[str, Any] = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 48,
}
GEOMETRIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, heads of 64": ("llama", {}),
    "llama, tied, heads of 128": ("llama", {
        "head_dim": 128, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama, biases, as many KV heads": ("llama", {
        "num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "qwen3, heads of 128": ("qwen3", {"head_dim": 128, "num_attention_heads": 4}),
    "qwen3, tied, heads of 32": ("qwen3", {
        "head_dim": 32, "num_attention_heads": 16, "tie_word_embeddings": True}),
    "qwen3_moe, mxfp4": ("qwen3_moe", {"head_dim": 64, "moe_intermediate_size": 64}),
    "qwen3_moe, bf16": ("qwen3_moe", {"head_dim": 64, "moe_intermediate_size": 96}),
    "qwen2, tied": ("qwen2", {"head_dim": 64, "tie_word_embeddings": True}),
    "mistral, a window": ("mistral", {"sliding_window": 48, "tie_word_embeddings": True}),
    "ministral3": ("ministral3", {"head_dim": 128, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 128,
        "llama_4_scaling_beta": 0.3}}),
    "mixtral": ("mixtral", {
        "head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "phi3": ("phi3", {"num_attention_heads": 4}),
    "phi3, partial RoPE": ("phi3", {"num_attention_heads": 4, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "granite": ("granite", {"tie_word_embeddings": True, "vocab_size": 37}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 48, "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                           "original_max_position_embeddings": 256},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "glm4_moe": ("glm4_moe", {
        "use_qk_norm": True, "n_routed_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 64, "first_k_dense_replace": 1}),
    "minimax_m2": ("minimax_m2", {
        "num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 64}),
    "gemma3, heads of 128": ("gemma3_text", _LOCAL_AND_GLOBAL | {"head_dim": 128}),
    "gemma3, heads of 256": ("gemma3_text", _LOCAL_AND_GLOBAL | {
        "head_dim": 256, "num_attention_heads": 4, "query_pre_attn_scalar": 256}),
    "gemma4, heads of 256 and 512": ("gemma4_text", _LOCAL_AND_GLOBAL | {
        "head_dim": 256, "global_head_dim": 512, "num_attention_heads": 4,
        "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0}),
    "gemma4 with experts": ("gemma4_text", _LOCAL_AND_GLOBAL | {
        "head_dim": 256, "global_head_dim": 512, "num_attention_heads": 4,
        "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 16,
        "top_k_experts": 4, "moe_intermediate_size": 64}),
    "gemma4 with layer embeddings": ("gemma4_text", {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 48,
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "head_dim": 256, "global_head_dim": 512, "num_attention_heads": 4,
        "attention_k_eq_v": False, "num_global_key_value_heads": None,
        "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB}),
    "qwen3_5": ("qwen3_5_text", _HYBRID),
    "qwen3_5, heads of 256": ("qwen3_5_text", _HYBRID | {"head_dim": 256}),
    "qwen3_5_moe": ("qwen3_5_moe_text", _HYBRID_EXPERTS),
    "qwen3_next": ("qwen3_next", _HYBRID_EXPERTS | {"linear_key_head_dim": 64}),
    "youtu": ("youtu", {
        **_LATENTS, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 256,
        "qk_nope_head_dim": 128, "v_head_dim": 128}),
    "youtu, heads of GLM-4.7-Flash": ("youtu", {
        **_LATENTS, "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": None,
        "qk_nope_head_dim": 192, "v_head_dim": 256, "tie_word_embeddings": False}),
    "deepseek_v3": ("deepseek_v3", {
        **_LATENTS, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 256,
        "qk_nope_head_dim": 128, "v_head_dim": 128, **_EXPERTS, "n_group": 4, "topk_group": 2}),
    "glm4_moe_lite": ("glm4_moe_lite", {
        **_LATENTS, "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 256,
        "qk_nope_head_dim": 192, "v_head_dim": 256, **_EXPERTS}),
    "deepseek_v2, mxfp4": ("deepseek_v2", {
        **_LATENTS, "num_attention_heads": 16, "num_key_value_heads": 16,
        "qk_nope_head_dim": 128, "v_head_dim": 128, **_EXPERTS, "n_shared_experts": 2}),
}  # fmt: skip
# The features of the drafts, assigned to the models in turn.
DRAFTS: tuple[dict[str, Any], ...] = (
    {}, {"norm_before_fc": True, "norm_output": True}, {"fc_norm": True, "norm_output": True},
)  # fmt: skip


def build_dense(
    folder: Path, geometry: str, *, inner: int = SIZES["intermediate_size"], **build_options: Any
) -> tuple[Path, Path]:
    """Build a checkpoint of :data:`GEOMETRIES` in ``folder``, and its engine with a draft.

    ``asked`` are build options; ``inner`` is the width of a dense layer.
    """
    kind, changes = GEOMETRIES[geometry]
    sizes = SIZES | {"intermediate_size": inner} | changes
    if kind in DEEPSEEK_KINDS:
        del sizes["head_dim"]
        write_deepseek(folder / "model", kind=kind, **sizes)
    else:
        write_llama(folder / "model", kind, **sizes)
    coded = "mxfp4" if geometry.endswith("mxfp4") else None
    if coded is not None:
        edit_tensors(folder / "model", round_to_mxfp4)
    variant = DRAFTS[list(GEOMETRIES).index(geometry) % len(DRAFTS)]
    write_draft(
        folder / "draft", target_layers=sizes["num_hidden_layers"],
        target_hidden=sizes["hidden_size"], target_vocab=sizes["vocab_size"],
        hidden=sizes["hidden_size"], inner=320, head_dim=64,
        draft_vocab=VOCAB, aux_layers=(0, 1, 2), max_positions=1024, **variant,
    )  # fmt: skip
    usual = {"backend": "cuda", "max_seq_len": 512, "max_batch_size": 4, "page_size": 64}
    options = BuildOptions.from_flat(
        model=folder / "model", draft=folder / "draft", output=folder / "engine",
        **usual | {"weights_dtype": coded} | asdict(TREE) | build_options,
    )  # fmt: skip
    build(options, SilentProgress())
    return folder / "model", folder / "engine"


def round_to_mxfp4(tensors: dict[str, torch.Tensor]) -> None:
    """Round all tensors that are stored in MXFP4, also for transformers."""
    stored = ("_proj.weight", "_proj_with_mqa.weight", "lm_head.weight")
    for name in [n for n in tensors if n.endswith(stored)]:
        blocks, scales = mxfp4_blocks(tensors[name][None])
        tensors[name] = expert_weight(blocks, scales)[0].T.contiguous().to(tensors[name].dtype)
