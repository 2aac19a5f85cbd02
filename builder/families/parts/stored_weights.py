"""A checkpoint's tensors in plain torch, for references: FP8 weights times their scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

_SCALE = "_scale_inv"


def stored_weights(path: Path, block: Sequence[int] | None) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint; ``block`` are the rows and columns that share a scale."""
    stored: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        stored |= load_file(file)
    if block is None:
        return stored
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        scale = stored.get(f"{name}{_SCALE}")
        if scale is not None:
            for axis, size in enumerate(block):
                scale = scale.repeat_interleave(size, dim=axis)
            rows, columns = tensor.shape
            weights[name] = tensor.float() * scale[:rows, :columns].float()
        elif not name.endswith(_SCALE):
            weights[name] = tensor
    return weights


def scale_block(fields: Mapping[str, Any]) -> Sequence[int] | None:
    """The blocks of ``config.json``'s FP8 weights, None where there are none."""
    section = fields.get("quantization_config")
    return section["weight_block_size"] if isinstance(section, dict) else None


def fp8_options(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that load FP8 blocks as fp32; none without such blocks."""
    block = scale_block(fields)
    if block is None:
        return {}
    return {"pretrained_model_name_or_path": None, "state_dict": stored_weights(path, block)}
