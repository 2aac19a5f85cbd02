"""Write small random checkpoints of DeepSeek and similar models with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoint_files import Tensors, edit_config, edit_tensors

# A small vocabulary, so that tokens of a random draft are sometimes accepted.
LAYERS, HIDDEN, VOCAB = 2, 64, 32
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "max_position_embeddings": 512,
    "rms_norm_eps": 0.02,  # far from the latents' norms, which transformers leaves at 1e-6
    "rope_parameters": YARN,
}


_SIGMOIDS = {"n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# By kind: the class in transformers, and the differences from SIZES.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3", {}),
    "kimi_k2": ("DeepseekV3", {**_SIGMOIDS, "n_shared_experts": 1}),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **_SIGMOIDS, "n_shared_experts": 1, "routed_scaling_factor": 1.8, "v_head_dim": 28,
            "rope_parameters": _PLAIN_ROPE,
        },
    ),
    "youtu": (
        "Youtu",
        {
            "tie_word_embeddings": True, "pad_token_id": 5, "bos_token_id": 1, "eos_token_id": 2,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 1.0, "mscale_all_dim": 0,
            },
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            "q_lora_rank": None, "n_group": None, "topk_group": None, "topk_method": "greedy",
            "norm_topk_prob": False, "routed_scaling_factor": 1.0,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
}  # fmt: skip
KINDS["youtu_llm"] = KINDS["youtu"]
GROUPS_BY_BEST = {
    "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 4.0, "q_lora_rank": 24,
}  # fmt: skip


def write_deepseek(
    path: Path,
    *,
    kind: str = "deepseek_v3",
    seed: int = 0,
    dtype: str = "float32",
    shard_size: str = "1GB",
    **changes: Any,
) -> None:
    """Write a random model of this kind, of :data:`SIZES` and ``changes``, under ``path``."""
    import transformers

    name, own = KINDS[kind]
    sizes = SIZES | own | changes
    if name == "Youtu":
        sizes = {key: value for key, value in sizes.items() if not _of_experts(key)}
    if name == "Glm4MoeLite":
        dense = sizes.pop("first_k_dense_replace")
        layers = sizes["num_hidden_layers"]
        sizes["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    randomise(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=shard_size)
    if kind != config.model_type:
        edit_config(path, model_type=kind)


def _of_experts(field: str) -> bool:
    return "group" in field or "expert" in field or "moe" in field or "dense" in field


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Set random weights, scaled so that the logits differ clearly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.2 * noise)
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * noise)
            else:
                tensor.copy_(1.2 * noise * tensor.shape[-1] ** -0.5)


def add_predictor(path: Path, *, seed: int = 9, layers: int = LAYERS) -> None:
    """Append a random MTP layer of the shapes of the last layer."""
    edit_config(path, num_nextn_predict_layers=1)
    edit_tensors(path, lambda tensors: tensors.update(_predictor(tensors, seed, layers)))


def _predictor(tensors: Tensors, seed: int, layers: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    norm, hidden = tensors["model.norm.weight"], len(tensors["model.norm.weight"])
    made = {
        f"{new}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{new}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    shapes = {
        f"{new}{name}": torch.Size(shape)
        for name, shape in {
            "enorm.weight": (hidden,),
            "hnorm.weight": (hidden,),
            "shared_head.norm.weight": (hidden,),
            "eh_proj.weight": (hidden, 2 * hidden),
        }.items()
    }
    shapes |= {n.replace(last, new): t.shape for n, t in tensors.items() if n.startswith(last)}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        scaled = 1 + 0.2 * noise if name.endswith("norm.weight") else noise * shape[-1] ** -0.5
        made[name] = (0.1 * noise if name.endswith("bias") else scaled).to(norm.dtype)
    return made


def quantise(path: Path, block: tuple[int, int] = (128, 128), **section: Any) -> None:
    """Store the layers' matrices as FP8 with block scales, as DeepSeek-V3 does.

    ``section`` has further fields of ``quantization_config``.
    """
    edit_config(
        path, quantization_config={"quant_method": "fp8", "weight_block_size": block} | section
    )
    edit_tensors(path, lambda tensors: tensors.update(_quantised(tensors, block)))


def _quantised(tensors: Tensors, block: tuple[int, int]) -> Tensors:
    made: Tensors = {}
    for name, weight in tensors.items():
        if ".layers." not in name or weight.dim() != 2 or name.endswith("gate.weight"):
            continue
        codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        rows, columns = ([*range(0, n, b)] for n, b in zip(weight.shape, block, strict=True))
        scale = torch.empty(len(rows), len(columns))
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                part = (slice(row, row + block[0]), slice(column, column + block[1]))
                scale[i, j] = weight[part].abs().max() / 448
                codes[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
        made |= {name: codes, f"{name}_scale_inv": scale}
    return made
