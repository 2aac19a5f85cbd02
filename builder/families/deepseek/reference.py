"""DeepSeek in transformers: where it chooses experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specbuild.builder.families.parts.routing_margin import choice_margin


def routers(model: Any) -> dict[int, nn.Module]:
    """The routers, by layer; the first layers have none."""
    dense = model.config.first_k_dense_replace
    return {i: layer.mlp.gate for i, layer in enumerate(model.model.layers) if i >= dense}


def routing_margin(router: Any, logits: torch.Tensor) -> float:
    """The smaller of the distances between groups and between experts of the groups taken."""
    scores = logits.sigmoid() + router.e_score_correction_bias
    by_group = scores.unflatten(-1, (router.num_group, -1))
    sums = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(dim=-1)
    taken = sums.topk(router.topk_group, dim=-1).indices
    kept = torch.zeros_like(sums).scatter(-1, taken, 1.0).bool().unsqueeze(-1)
    within = by_group.masked_fill(~kept, -torch.inf).flatten(-2)
    groups = choice_margin(sums, router.topk_group)
    return min(groups, choice_margin(within, router.top_k))
