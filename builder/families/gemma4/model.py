"""Gemma 4's blocks: experts beside the feed-forward, and inputs and a factor for each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from specbuild.builder.families.parts.experts import ExpertWeights, combine_experts
from specbuild.builder.families.parts.grouped_model import GroupedModel, rounded_feed_forward
from specbuild.builder.families.parts.llama import norm_module
from specbuild.builder.families.parts.target import Block, GraphSizes
from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    FeedForward,
    MoeFeedForward,
)
from specbuild.runtime.engine_dir.geometry import TargetGeometry

# Norms that only blocks with experts have: of the feed-forward's output, the experts' input, and
# the experts' output.
APART_NORMS = (
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)


class Router(nn.Module):
    """The router: a norm, a projection, and a factor for each expert."""

    def __init__(self, g: TargetGeometry, moe: MoeFeedForward) -> None:
        super().__init__()
        self.eps = g.norm.eps
        self.scale = nn.Parameter(torch.empty(g.hidden))
        self.proj = nn.Linear(g.hidden, moe.experts, bias=False)
        self.per_expert_scale = nn.Parameter(torch.empty(moe.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [T, E] of hidden states ``x`` [T, H]; ``scale`` includes ``H^-½``."""
        normed = F.rms_norm(x.float(), self.scale.shape, self.scale.float(), self.eps)
        logits: torch.Tensor = self.proj(normed.to(x.dtype))
        return logits


class Gemma4Block(Block):
    """A block whose experts and feed-forward both read the hidden states, with separate norms."""

    def __init__(
        self,
        g: TargetGeometry,
        number: int,
        norms: Sequence[nn.Module],
        *parts: Any,
        **options: Any,
    ) -> None:
        super().__init__(norms, *parts, **options)
        feed_forward = g.feed_forward(number)
        self.routing = feed_forward.moe if isinstance(feed_forward, BothFeedForward) else None
        if self.routing is not None:
            self.router = Router(g, self.routing)
            self.experts = ExpertWeights(g.hidden, self.routing)
            for name in APART_NORMS:
                self.add_module(name, norm_module(g.norm, g.hidden))
        if g.layer_inputs is not None:
            width = g.layer_inputs.width
            self.per_layer_input_gate = nn.Linear(g.hidden, width, bias=False)
            self.per_layer_projection = nn.Linear(width, g.hidden, bias=False)
            self.post_per_layer_input_norm = norm_module(g.norm, g.hidden)
        self.layer_scalar = nn.Parameter(torch.empty(1)) if g.layer_scale else None

    def feed_forward(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Return the sum of feed-forward and experts, for hidden states ``x`` [T, H]."""
        dense = super().feed_forward(x, normed)
        if self.routing is None:
            return dense
        dense_output_norm, expert_input_norm, expert_output_norm = map(
            self.get_submodule, APART_NORMS
        )
        routed = combine_experts(
            expert_input_norm(x),
            self.router(x).float(),
            self.experts,
            self.routing,
            expert_scale=self.router.per_expert_scale.float(),
        )
        summed: torch.Tensor = dense_output_norm(dense) + expert_output_norm(routed)
        return summed

    def finalize(self, x: torch.Tensor, layer_input: torch.Tensor | None) -> torch.Tensor:
        """Add the layer's part of ``layer_input`` to ``x`` [T, H]; multiply by its factor."""
        if layer_input is not None:
            gate = F.gelu(self.per_layer_input_gate(x), approximate="tanh")
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gate * layer_input))
        return x if self.layer_scalar is None else x * self.layer_scalar


class Gemma4Model(GroupedModel):
    """A Gemma 4 in the role ``target``."""

    def __init__(self, g: TargetGeometry, sizes: GraphSizes) -> None:
        super().__init__(
            g, sizes, _dense_part, block=lambda number: partial(Gemma4Block, g, number)
        )
        if g.layer_inputs is not None:
            inputs, width = g.layer_inputs, g.layers * g.layer_inputs.width
            self.model.embed_tokens_per_layer = nn.Embedding(inputs.vocab, width)
            self.model.per_layer_model_projection = nn.Linear(g.hidden, width, bias=False)
            self.model.per_layer_projection_norm = norm_module(g.norm, inputs.width)

    def layer_inputs(self, token_ids: torch.Tensor, x: torch.Tensor) -> Sequence[Any]:
        """Return every layer's second input, for tokens [T] with embeddings ``x`` [T, H]."""
        g = self.geometry
        if g.layer_inputs is None:
            return super().layer_inputs(token_ids, x)
        model: Any = self.model
        by_layer = (g.layers, g.layer_inputs.width)
        embedded = model.embed_tokens_per_layer(token_ids) * math.sqrt(g.layer_inputs.width)
        projected = model.per_layer_model_projection(x) * g.hidden**-0.5
        from_hidden = model.per_layer_projection_norm(projected.unflatten(1, by_layer))
        inputs = (from_hidden + embedded.unflatten(1, by_layer)) * 2**-0.5
        return [inputs.select(1, layer) for layer in range(g.layers)]


def _dense_part(hidden: int, feed_forward: FeedForward) -> nn.Module:
    """Return the module of the feed-forward that every token uses."""
    both = isinstance(feed_forward, BothFeedForward)
    return rounded_feed_forward(hidden, feed_forward.dense if both else feed_forward)  # type: ignore[union-attr]
