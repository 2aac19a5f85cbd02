"""Gemma 4 in transformers: where it chooses experts, and what drafts are trained on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specbuild.builder.families.parts.routing_margin import choice_margin


def routers(model: Any) -> dict[int, nn.Module]:
    """The routers, by layer; they return the probabilities of experts first."""
    layers = enumerate(model.model.layers)
    return {i: layer.router for i, layer in layers if hasattr(layer, "router")}


def routing_margin(router: Any, probabilities: torch.Tensor) -> float:
    """The smallest distance between the logits of a chosen and an unchosen expert in any row."""
    return choice_margin(probabilities.log(), router.config.top_k_experts)


def prepare_teacher(model: Any) -> None:
    """Compute routed experts as grouped products; dense models need no preparation."""
    if routers(model):
        model.set_experts_implementation("grouped_mm")
