"""GPT-OSS in transformers: how to load it, and its routers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specbuild.builder.families.parts.routing_margin import choice_margin


def load_options(_path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that dequantize MXFP4 experts."""
    if "quantization_config" not in config:
        return {}
    from transformers.utils.quantization_config import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def routers(model: Any) -> dict[int, nn.Module]:
    """Return the routers by layer."""
    return {i: layer.mlp.router for i, layer in enumerate(model.model.layers)}


def routing_margin(router: Any, logits: torch.Tensor) -> float:
    """Return the smallest distance between a chosen and another expert in any row."""
    return choice_margin(logits, router.top_k)
