"""Llama and its kin: grouped-query attention, and a SwiGLU or routed experts."""

from __future__ import annotations

import torch
from torch import nn

from specbuild.builder.families.parts.attention import GroupedAttention
from specbuild.builder.families.parts.experts import ExpertWeights, mixed_experts
from specbuild.builder.families.parts.llama import LlamaNorm, SwigluMlp
from specbuild.builder.families.parts.target import Backbone, Block, GraphSizes, TargetModel
from specbuild.runtime.engine_dir.geometry import (
    DenseFeedForward,
    FeedForward,
    MoeFeedForward,
    TargetGeometry,
)


class MoeMlp(nn.Module):
    """A router without bias, and its experts."""

    def __init__(self, hidden: int, moe: MoeFeedForward) -> None:
        super().__init__()
        self.routing = moe
        self.gate = nn.Linear(hidden, moe.experts, bias=False)
        self.experts = ExpertWeights(hidden, moe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, H], normed → [T, H]."""
        return mixed_experts(x, self.gate(x).float(), self.experts, self.routing)


def layer_of(g: TargetGeometry, number: int, sizes: GraphSizes) -> Block:
    """The block of this number."""
    norms = LlamaNorm(g.hidden, g.norm.eps), LlamaNorm(g.hidden, g.norm.eps)
    mlp = _mlp(g.hidden, g.feed_forward(number))
    return Block(norms, GroupedAttention(g, number, sizes), mlp)


def _mlp(hidden: int, feed_forward: FeedForward) -> nn.Module:
    if isinstance(feed_forward, DenseFeedForward):
        return SwigluMlp(hidden, feed_forward.inner, bias=feed_forward.bias)
    assert isinstance(feed_forward, MoeFeedForward)
    return MoeMlp(hidden, feed_forward)


class Llama(TargetModel):
    """The family in the role ``target``."""

    def __init__(self, g: TargetGeometry, sizes: GraphSizes) -> None:
        layers = [layer_of(g, number, sizes) for number in range(g.layers)]
        backbone = Backbone(g, layers, LlamaNorm(g.hidden, g.norm.eps))
        super().__init__(
            g, sizes.aux_layers, backbone, torch.empty(sizes.positions, g.head_dim // 2)
        )
