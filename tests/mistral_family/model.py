"""Mistral: grouped-query attention in windows and a SwiGLU, without biases."""

from __future__ import annotations

import torch

from specbuild.builder.families.parts.attention import GroupedAttention
from specbuild.builder.families.parts.llama import LlamaNorm, SwigluMlp
from specbuild.builder.families.parts.target import Backbone, Block, GraphSizes, TargetModel
from specbuild.runtime.engine_dir.geometry import DenseFeedForward, TargetGeometry


def layer_of(g: TargetGeometry, number: int, sizes: GraphSizes) -> Block:
    """The block of this number."""
    mlp = g.feed_forward(number)
    assert isinstance(mlp, DenseFeedForward)
    norms = LlamaNorm(g.hidden, g.norm.eps), LlamaNorm(g.hidden, g.norm.eps)
    return Block(norms, GroupedAttention(g, number, sizes), SwigluMlp(g.hidden, mlp.inner))


class Mistral(TargetModel):
    """Mistral in the role ``target``."""

    def __init__(self, g: TargetGeometry, sizes: GraphSizes) -> None:
        layers = [layer_of(g, number, sizes) for number in range(g.layers)]
        backbone = Backbone(g, layers, LlamaNorm(g.hidden, g.norm.eps))
        super().__init__(
            g, sizes.aux_layers, backbone, torch.empty(sizes.positions, g.head_dim // 2)
        )
