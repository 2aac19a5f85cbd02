"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437): MLA, then a dense MLP or routed experts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from specbuild.builder.families.deepseek.mla import EngineMlaAttention
from specbuild.builder.families.parts.experts import ExpertWeights, mixed_experts
from specbuild.builder.families.parts.llama import LlamaNorm, SwigluMlp
from specbuild.builder.families.parts.target import Backbone, Block, GraphSizes, TargetModel
from specbuild.runtime.engine_dir.geometry import (
    BothFeedForward,
    DenseFeedForward,
    FeedForward,
    MoeFeedForward,
    TargetGeometry,
)


class Router(nn.Module):
    """The affinities of experts; in V3 there is a bias too that experts are chosen by."""

    def __init__(self, hidden: int, moe: MoeFeedForward) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(moe.experts, hidden))
        if moe.choice_bias:
            self.e_score_correction_bias = nn.Parameter(torch.empty(moe.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, H] → logits fp32 [T, E]."""
        return F.linear(x.float(), self.weight.float())


class MoeMlp(nn.Module):
    """Routed experts, and those that every token has."""

    def __init__(self, hidden: int, moe: MoeFeedForward, shared: DenseFeedForward | None) -> None:
        super().__init__()
        self.routing, self.shared = moe, shared is not None
        self.gate, self.experts = Router(hidden, moe), ExpertWeights(hidden, moe)
        if shared is not None:
            self.shared_experts = SwigluMlp(hidden, shared.inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, H], normed → [T, H]."""
        bias = self.gate.e_score_correction_bias.float() if self.routing.choice_bias else None
        routed = mixed_experts(x, self.gate(x), self.experts, self.routing, bias)
        return routed + self.shared_experts(x) if self.shared else routed


def layer_of(g: TargetGeometry, number: int) -> Block:
    """The block of this number."""
    assert g.mla is not None
    norms = LlamaNorm(g.hidden, g.norm.eps), LlamaNorm(g.hidden, g.norm.eps)
    attention = EngineMlaAttention(g.hidden, g.q_heads, g.mla)
    return Block(norms, attention, _mlp(g.hidden, g.feed_forward(number)))


def _mlp(hidden: int, feed_forward: FeedForward) -> nn.Module:
    if isinstance(feed_forward, DenseFeedForward):
        return SwigluMlp(hidden, feed_forward.inner)
    if isinstance(feed_forward, BothFeedForward):
        return MoeMlp(hidden, feed_forward.moe, feed_forward.dense)
    return MoeMlp(hidden, feed_forward, None)


class DeepSeek(TargetModel):
    """A DeepSeek in the role ``target``."""

    def __init__(self, g: TargetGeometry, sizes: GraphSizes) -> None:
        assert g.mla is not None
        layers = [layer_of(g, number) for number in range(g.layers)]
        backbone = Backbone(g, layers, LlamaNorm(g.hidden, g.norm.eps))
        table = torch.empty(sizes.positions, g.mla.rope_dim // 2)
        super().__init__(g, sizes.aux_layers, backbone, table)
