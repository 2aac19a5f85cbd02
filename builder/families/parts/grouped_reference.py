"""Models of transformers with grouped-query attention, as references and as teachers of drafts."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from specbuild.builder.families.parts.routing_margin import choice_margin

_MIXTRAL_MATRICES = {"gate": "w1", "down": "w2", "up": "w3"}


def routers(model: Any) -> dict[int, nn.Module]:
    """The routers, by layer; a dense layer has none."""
    layers = enumerate(model.model.layers)
    return {i: layer.mlp.gate for i, layer in layers if hasattr(layer.mlp, "gate")}


def routing_margin(router: Any, logits: torch.Tensor) -> float:
    """The smallest distance between a chosen and an unchosen expert in any row."""
    return choice_margin(logits, router.top_k)


def mixtral_name(name: str) -> str:
    """Name an expert's matrix as Mixtral's safetensors do, for transformers' conversion."""
    return re.sub(
        r"mlp\.experts\.(\d+)\.(gate|up|down)_proj",
        lambda found: f"block_sparse_moe.experts.{found[1]}.{_MIXTRAL_MATRICES[found[2]]}",
        name,
    )


def prepare_teacher(model: Any) -> None:
    """Compute routed experts as grouped products; dense models need no preparation."""
    if routers(model):
        model.set_experts_implementation("grouped_mm")
