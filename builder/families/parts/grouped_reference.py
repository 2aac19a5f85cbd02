"""Where models in transformers choose experts, and how near a choice came to another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specbuild.builder.families.parts.routing_margin import choice_margin


def routers(model: Any) -> dict[int, nn.Module]:
    """The routers, by layer; a dense layer has none."""
    layers = enumerate(model.model.layers)
    return {i: layer.mlp.gate for i, layer in layers if hasattr(layer.mlp, "gate")}


def routing_margin(router: Any, logits: torch.Tensor) -> float:
    """The smallest distance between a chosen and an unchosen expert in any row."""
    return choice_margin(logits, router.top_k)
