"""Gemma 4 in transformers: its routers, and how to prepare it as a teacher."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specbuild.builder.families.parts.routing_margin import choice_margin


def routers(model: Any) -> dict[int, nn.Module]:
    """Return the routers by layer; their first output is the experts' probabilities."""
    layers = enumerate(model.model.layers)
    return {i: layer.router for i, layer in layers if hasattr(layer, "router")}


def routing_margin(router: Any, probabilities: torch.Tensor) -> float:
    """Return the smallest distance of the logits of a chosen and another expert in any row."""
    return choice_margin(probabilities.log(), router.config.top_k_experts)


def prepare_teacher(model: Any) -> None:
    """Compute routed experts as grouped products; dense models need no preparation."""
    if routers(model):
        model.set_experts_implementation("grouped_mm")
