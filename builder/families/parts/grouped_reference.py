"""Transformers models with grouped-query attention, as references and as teachers of drafts."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from specbuild.builder.families.parts.routing_margin import choice_margin

_MIXTRAL_MATRICES = {"gate": "w1", "down": "w2", "up": "w3"}


def routers(model: Any) -> dict[int, nn.Module]:
    """Return the routers by layer; dense layers have none."""
    layers = enumerate(model.model.layers)
    return {i: layer.mlp.gate for i, layer in layers if hasattr(layer.mlp, "gate")}


def routing_margin(router: Any, logits: torch.Tensor) -> float:
    """Return the smallest distance between a selected and another expert in any row."""
    return choice_margin(logits, router.top_k)


def mixtral_name(name: str) -> str:
    """Name an expert's matrix as Mixtral's safetensors do, for transformers' conversion."""
    return re.sub(
        r"mlp\.experts\.(\d+)\.(gate|up|down)_proj",
        lambda match: f"block_sparse_moe.experts.{match[1]}.{_MIXTRAL_MATRICES[match[2]]}",
        name,
    )


def prepare_teacher(model: Any) -> None:
    """Compute routed experts as grouped products; dense models need no preparation."""
    if routers(model):
        model.set_experts_implementation("grouped_mm")
