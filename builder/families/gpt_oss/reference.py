"""GPT-OSS in transformers: how it is loaded, and where it chooses experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specbuild.builder.families.parts.routing_margin import choice_margin


def load_options(_path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """MXFP4 experts are dequantised."""
    if "quantization_config" not in config:
        return {}
    from transformers.utils.quantization_config import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def routers(model: Any) -> dict[int, nn.Module]:
    """The routers, by layer."""
    return {i: layer.mlp.router for i, layer in enumerate(model.model.layers)}


def routing_margin(router: Any, logits: torch.Tensor) -> float:
    """The smallest distance between a chosen and an unchosen expert in any row."""
    return choice_margin(logits, router.top_k)
