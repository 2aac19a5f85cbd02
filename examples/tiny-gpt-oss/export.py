"""Write and read the example target as GPT-OSS is released: experts in MXFP4, the rest bf16."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from geometry import Geometry
from model import Target
from safetensors.torch import load_file
from torch import Tensor

from specbuild.builder.checkpoint.mxfp4 import dequantise, quantise
from specbuild.builder.checkpoint.tensor_file import write_tensors

LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "sinks": "self_attn.sinks",
    "router": "mlp.router.weight",
    "router_bias": "mlp.router.bias",
    "gate_up": "mlp.experts.gate_up_proj",
    "gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "down": "mlp.experts.down_proj",
    "down_bias": "mlp.experts.down_proj_bias",
}
TOP_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}
MXFP4_FIELDS = {"gate_up", "down"}


def checkpoint_name(parameter: str) -> str:
    """Return the release's name of a parameter of `Target`, such as `blocks.3.q`."""
    if parameter in TOP_NAMES:
        return TOP_NAMES[parameter]
    _, layer, field = parameter.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[field]}"


def save_target(model: Target, folder: Path) -> None:
    """Write `config.json`, `generation_config.json` and `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for parameter, value in model.named_parameters():
        name = checkpoint_name(parameter)
        if parameter.rpartition(".")[2] in MXFP4_FIELDS:
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = quantise(value.detach())
        else:
            tensors[name] = value.detach().bfloat16()
    stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_tensors(folder / "model.safetensors", stored)
    geometry = model.geometry
    generation = {
        "eos_token_id": [geometry.end_of_text],
        "pad_token_id": geometry.pad,
        "do_sample": False,
    }
    _write_json(folder / "config.json", geometry.hf_config())
    _write_json(folder / "generation_config.json", generation)


def load_target(folder: Path, geometry: Geometry | None = None) -> Target:
    """Return the float32 training model that holds exactly the stored values."""
    tensors = load_file(folder / "model.safetensors")
    model = Target(geometry or Geometry())
    with torch.no_grad():
        for parameter, value in model.named_parameters():
            name = checkpoint_name(parameter)
            if parameter.rpartition(".")[2] in MXFP4_FIELDS:
                value.copy_(dequantise(tensors[f"{name}_blocks"], tensors[f"{name}_scales"]))
            else:
                value.copy_(tensors[name])
    return model


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
