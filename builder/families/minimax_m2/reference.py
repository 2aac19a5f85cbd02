"""MiniMax-M2 in transformers: how it is loaded, and where it chooses experts."""

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
    """The class's own configuration, with the share of a head that turns.

    Transformers does not read ``rotary_dim``, which releases have.
    """
    import transformers

    own = {name: value for name, value in fields.items() if name != "quantization_config"}
    if fields.get("rotary_dim") is not None:
        own["partial_rotary_factor"] = fields["rotary_dim"] / fields.get("head_dim", 128)
    return {"config": transformers.MiniMaxM2Config.from_dict(own)}


def stored_name(name: str) -> str:
    """Name a tensor as MiniMax's safetensors do, for transformers' conversion."""
    named = mixtral_name(name).replace(f"mlp.gate.{_BIAS}", f"block_sparse_moe.{_BIAS}")
    return named.replace("mlp.gate.weight", "block_sparse_moe.gate.weight")


def routers(model: Any) -> dict[int, nn.Module]:
    """The routers, by layer; each is given the bias that its block chooses by."""
    found = {}
    for number, layer in enumerate(model.model.layers):
        found[number] = layer.mlp.gate
        setattr(layer.mlp.gate, _BIAS, getattr(layer.mlp, _BIAS))
    return found


def routing_margin(router: Any, logits: torch.Tensor) -> float:
    """The smallest distance between a chosen and an unchosen expert in any row."""
    return choice_margin(logits.sigmoid() + getattr(router, _BIAS), router.top_k)
