"""DeepSeek-V3 (arXiv 2412.19437): MLA, a dense MLP in the first layers, then routed experts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from specbuild.builder.families.deepseek.mla import EngineMlaAttention
from specbuild.builder.families.family import GraphSizes
from specbuild.builder.families.parts.llama import LlamaNorm, SwigluMlp
from specbuild.builder.families.parts.target import Backbone, Block, TargetModel
from specbuild.plugins_cuda.torch_ops import torch_op
from specbuild.runtime.engine_dir.manifest import TargetGeometry


class Router(nn.Module):
    """The affinities of experts, and the bias that experts are chosen by."""

    def __init__(self, g: TargetGeometry) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(g.experts, g.hidden))
        self.e_score_correction_bias = nn.Parameter(torch.empty(g.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, H] → logits fp32 [T, E]."""
        return F.linear(x.float(), self.weight.float())


class Experts(nn.Module):
    """The routed experts' weights [E, in, out]; gate and up stand interleaved."""

    def __init__(self, g: TargetGeometry) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(g.experts, g.hidden, 2 * g.expert_inner))
        self.down_proj = nn.Parameter(torch.empty(g.experts, g.expert_inner, g.hidden))


class MoeMlp(nn.Module):
    """Routed experts, and those that every token has."""

    def __init__(self, g: TargetGeometry) -> None:
        super().__init__()
        assert g.feed_forward is not None
        self.geometry, self.routing = g, g.feed_forward
        self.gate, self.experts = Router(g), Experts(g)
        if self.routing.shared_inner:
            self.shared_experts = SwigluMlp(g.hidden, self.routing.shared_inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, H], normed → [T, H]."""
        routed = torch_op("Moe")(
            x,
            self.gate(x),
            self.experts.gate_up_proj,
            None,
            None,
            self.experts.down_proj,
            None,
            None,
            self.gate.e_score_correction_bias.float(),
            top_k=self.geometry.experts_per_token,
            gating="sigmoid_norm" if self.routing.normalised else "sigmoid",
            activation="swiglu",
            groups=self.routing.groups,
            groups_chosen=self.routing.groups_chosen,
            scaling=self.routing.scaling,
        )
        return routed + self.shared_experts(x) if self.routing.shared_inner else routed


def layer_of(g: TargetGeometry, number: int) -> Block:
    """The block of this number."""
    assert g.mla is not None and g.feed_forward is not None
    dense = number < g.feed_forward.dense_layers
    mlp = SwigluMlp(g.hidden, g.feed_forward.dense_inner) if dense else MoeMlp(g)
    norms = LlamaNorm(g.hidden, g.rms_eps), LlamaNorm(g.hidden, g.rms_eps)
    return Block(norms, EngineMlaAttention(g.hidden, g.q_heads, g.mla), mlp)


class DeepSeek(TargetModel):
    """DeepSeek-V3 in the role ``target``."""

    def __init__(self, g: TargetGeometry, sizes: GraphSizes) -> None:
        assert g.mla is not None
        layers = [layer_of(g, number) for number in range(g.layers)]
        backbone = Backbone(g, layers, LlamaNorm(g.hidden, g.rms_eps))
        table = torch.empty(sizes.positions, g.mla.rope_dim // 2)
        super().__init__(g, sizes.taps, backbone, table)
