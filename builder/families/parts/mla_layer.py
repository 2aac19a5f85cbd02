"""A block of MLA and a feed-forward: dense, or routed experts with shared ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from specbuild.builder.families.parts.experts import ExpertWeights, combine_experts
from specbuild.builder.families.parts.llama import LlamaNorm, SwigluMlp
from specbuild.builder.families.parts.mla import EngineMlaAttention
from specbuild.builder.families.parts.target import Block
from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    FeedForward,
    MoeFeedForward,
)
from specbuild.runtime.engine_dir.geometry import MlaGeometry


@dataclass(frozen=True)
class MlaLayer:
    """The sizes of a block; ``eps`` is that of the norms before attention and feed-forward.

    ``inputs`` is the width of attention's input; None is ``hidden``.
    """

    hidden: int
    heads: int
    mla: MlaGeometry
    eps: float
    feed_forward: FeedForward
    inputs: int | None = None

    def module(self) -> Block:
        """Return the block with the names of checkpoints."""
        return Block(*self.parts())

    def parts(self) -> tuple[tuple[nn.Module, nn.Module], nn.Module, nn.Module]:
        """Return the parts of a block: both norms, attention, feed-forward."""
        norms = LlamaNorm(self.hidden, self.eps), LlamaNorm(self.hidden, self.eps)
        attention = EngineMlaAttention(self.hidden, self.heads, self.mla, self.inputs)
        return norms, attention, feed_forward_module(self.hidden, self.feed_forward)


class Router(nn.Module):
    """Computes the logits of experts; V3 also has a selection bias."""

    def __init__(self, hidden: int, moe: MoeFeedForward) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(moe.experts, hidden))
        if moe.choice_bias:
            self.e_score_correction_bias = nn.Parameter(torch.empty(moe.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, H] → logits fp32 [T, E]."""
        return F.linear(x.float(), self.weight.float())


class MoeMlp(nn.Module):
    """Routed experts, and shared experts that every token uses."""

    def __init__(self, hidden: int, moe: MoeFeedForward, shared: DenseFeedForward | None) -> None:
        super().__init__()
        self.routing, self.shared = moe, shared is not None
        self.gate, self.experts = Router(hidden, moe), ExpertWeights(hidden, moe)
        if shared is not None:
            self.shared_experts = SwigluMlp(hidden, shared.inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, H], normed → [T, H]."""
        bias = self.gate.e_score_correction_bias.float() if self.routing.choice_bias else None
        routed = combine_experts(x, self.gate(x), self.experts, self.routing, choice_bias=bias)
        return routed + self.shared_experts(x) if self.shared else routed


def feed_forward_module(hidden: int, feed_forward: FeedForward) -> nn.Module:
    """Return the dense feed-forward, or routed and shared experts, with checkpoints' names."""
    if isinstance(feed_forward, DenseFeedForward):
        return SwigluMlp(hidden, feed_forward.inner, bias=feed_forward.bias)
    if isinstance(feed_forward, BothFeedForward):
        return MoeMlp(hidden, feed_forward.moe, feed_forward.dense)
    return MoeMlp(hidden, feed_forward, None)
