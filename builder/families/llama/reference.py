"""The family in transformers: how MiMo is loaded, and where Qwen3-MoE chooses experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specbuild.builder.families.parts.routing_margin import choice_margin

# A MiMo is a Qwen2 with MTP layers beside.
CLASSES = {"mimo": "Qwen2ForCausalLM"}


def load_options(_path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """MiMo's configuration as that of its class; nothing for types that transformers knows."""
    if fields["model_type"] not in CLASSES:
        return {}
    import transformers

    own = {"model_type": transformers.Qwen2Config.model_type}
    return {"config": transformers.Qwen2Config.from_dict({**fields, **own})}


def routers(model: Any) -> dict[int, nn.Module]:
    """The routers, by layer; a dense layer has none."""
    layers = enumerate(model.model.layers)
    return {i: layer.mlp.gate for i, layer in layers if hasattr(layer.mlp, "gate")}


def routing_margin(router: Any, logits: torch.Tensor) -> float:
    """The smallest distance between a chosen and an unchosen expert in any row."""
    return choice_margin(logits, router.top_k)
