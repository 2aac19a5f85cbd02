"""A target with grouped-query attention and a SwiGLU or routed experts, by its geometry."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from specbuild.builder.families.parts.attention import GroupedAttention
from specbuild.builder.families.parts.experts import ExpertWeights, combine_experts
from specbuild.builder.families.parts.gated_delta import NAME as LINEAR
from specbuild.builder.families.parts.gated_delta import GatedDeltaNet
from specbuild.builder.families.parts.llama import SwigluMlp, norm_module
from specbuild.builder.families.parts.target import (
    BLOCK_NORMS,
    Backbone,
    Block,
    GraphSizes,
    TargetModel,
)
from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    FeedForward,
    MoeFeedForward,
)
from specbuild.runtime.engine_dir.geometry import Multipliers, TargetGeometry


class RoundedRouter(nn.Linear):
    """A router with logits in the activations' dtype, and optionally a selection bias."""

    def __init__(self, hidden: int, moe: MoeFeedForward) -> None:
        super().__init__(hidden, moe.experts, bias=False)
        if moe.choice_bias:
            self.e_score_correction_bias = nn.Parameter(torch.empty(moe.experts))


class MoeMlp(nn.Module):
    """A router with rounded logits and its experts, optionally with a shared expert."""

    def __init__(
        self, hidden: int, moe: MoeFeedForward, shared: BothFeedForward | None = None
    ) -> None:
        super().__init__()
        self.routing, self.shared = moe, shared
        self.gate = RoundedRouter(hidden, moe)
        self.experts = ExpertWeights(hidden, moe)
        if shared is not None and shared.gated:
            self.shared_expert = SwigluMlp(hidden, shared.dense.inner)
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)
        elif shared is not None:
            self.shared_experts = SwigluMlp(hidden, shared.dense.inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, H], normed → [T, H]."""
        bias = self.gate.e_score_correction_bias.float() if self.routing.choice_bias else None
        routed = combine_experts(
            x, self.gate(x).float(), self.experts, self.routing, choice_bias=bias
        )
        if self.shared is None:
            return routed
        if self.shared.gated:
            return routed + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return routed + self.shared_experts(x)


def rounded_feed_forward(hidden: int, feed_forward: FeedForward) -> nn.Module:
    """Return a SwiGLU, or experts with a router of rounded logits and optional shared experts."""
    if isinstance(feed_forward, DenseFeedForward):
        kind = feed_forward.activation.kind
        return SwigluMlp(hidden, feed_forward.inner, bias=feed_forward.bias, activation=kind)
    if isinstance(feed_forward, BothFeedForward):
        return MoeMlp(hidden, feed_forward.moe, feed_forward)
    return MoeMlp(hidden, feed_forward)


class GroupedModel(TargetModel):
    """A target of the geometry ``g``.

    ``mlp`` creates the feed-forward of a layer. ``block`` returns the class of layer i, which
    differs in Gemma 4.
    """

    def __init__(
        self,
        g: TargetGeometry,
        sizes: GraphSizes,
        mlp: Callable[[int, FeedForward], nn.Module] = rounded_feed_forward,
        *,
        block: Callable[[int], Callable[..., Block]] = lambda _: Block,
    ) -> None:
        norms = sum(name is not None for name in BLOCK_NORMS[g.norm_places])
        layers = [
            block(number)(
                [norm_module(g.norm, g.hidden) for _ in range(norms)],
                GatedDeltaNet(g)
                if number in g.linear_layers
                else GroupedAttention(g, number, sizes),
                mlp(g.hidden, g.feed_forward(number)),
                places=g.norm_places,
                residual=(g.multipliers or Multipliers()).residual,
                attention_name=LINEAR if number in g.linear_layers else "self_attn",
            )
            for number in range(g.layers)
        ]
        backbone = Backbone(g, layers, norm_module(g.norm, g.hidden))
        table = torch.empty(sizes.positions, (g.rope.width or g.head_dim) // 2)
        super().__init__(g, sizes.aux_layers, backbone, table)
