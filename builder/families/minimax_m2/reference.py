"""MiniMax-M2 in transformers: how to load it, and its routers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specbuild.builder.families.parts.grouped_reference import mixtral_name
from specbuild.builder.families.parts.routing_margin import choice_margin

_BIAS = "e_score_correction_bias"


def load_options(_path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class's config, with the rotary share of a head.

    Transformers ignores ``rotary_dim``, which releases have.
    """
    import transformers

    config_fields = {name: value for name, value in fields.items() if name != "quantization_config"}
    if fields.get("rotary_dim") is not None:
        config_fields["partial_rotary_factor"] = fields["rotary_dim"] / fields.get("head_dim", 128)
    return {"config": transformers.MiniMaxM2Config.from_dict(config_fields)}


def stored_name(name: str) -> str:
    """Return a tensor's name in MiniMax's safetensors, for transformers' conversion."""
    named = mixtral_name(name).replace(f"mlp.gate.{_BIAS}", f"block_sparse_moe.{_BIAS}")
    return named.replace("mlp.gate.weight", "block_sparse_moe.gate.weight")


def routers(model: Any) -> dict[int, nn.Module]:
    """Return the routers by layer; each gets its block's bias as an attribute."""
    by_layer = {}
    for number, layer in enumerate(model.model.layers):
        by_layer[number] = layer.mlp.gate
        setattr(layer.mlp.gate, _BIAS, getattr(layer.mlp, _BIAS))
    return by_layer


def routing_margin(router: Any, logits: torch.Tensor) -> float:
    """Return the smallest distance between a chosen and another expert in any row."""
    return choice_margin(logits.sigmoid() + getattr(router, _BIAS), router.top_k)
