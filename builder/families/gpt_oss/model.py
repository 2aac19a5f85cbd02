"""GPT-OSS: grouped-query attention with sinks, and experts in every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specbuild.builder.families.gpt_oss.geometry import experts_of, swiglu_limit
from specbuild.builder.families.gpt_oss.latent_attention import LatentAttention
from specbuild.builder.families.parts.attention import GroupedAttention
from specbuild.builder.families.parts.llama import RmsNorm
from specbuild.builder.families.parts.target import Backbone, Block, GraphSizes, TargetModel
from specbuild.plugins_cuda.torch_ops import torch_op
from specbuild.runtime.engine_dir.feed_forward import MoeFeedForward
from specbuild.runtime.engine_dir.geometry import TargetGeometry


class Experts(nn.Module):
    """The expert weights, as MXFP4 blocks and scales or as plain [E, in, out] matrices."""

    def __init__(self, hidden: int, moe: MoeFeedForward) -> None:
        super().__init__()
        experts, inner = moe.experts, moe.inner
        self.storage = moe.storage
        if self.storage == "mxfp4":
            for name, rows, width in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
                blocks = (experts, rows, width // 32, 16)
                self._bytes(f"{name}_proj_blocks", blocks)
                self._bytes(f"{name}_proj_scales", blocks[:3])
        else:
            self.gate_up_proj = nn.Parameter(torch.empty(experts, hidden, 2 * inner))
            self.down_proj = nn.Parameter(torch.empty(experts, inner, hidden))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * inner))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, hidden))

    def _bytes(self, name: str, shape: tuple[int, ...]) -> None:
        empty = torch.empty(shape, dtype=torch.uint8)
        self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def weights(self) -> tuple[Any, ...]:
        """Return the six weight inputs of the op ``Moe``, in its order."""
        if self.storage == "mxfp4":
            return (
                self.gate_up_proj_blocks,
                self.gate_up_proj_scales,
                self.gate_up_proj_bias,
                self.down_proj_blocks,
                self.down_proj_scales,
                self.down_proj_bias,
            )
        return (
            self.gate_up_proj, None, self.gate_up_proj_bias,
            self.down_proj, None, self.down_proj_bias,
        )  # fmt: skip


class MoeBlock(nn.Module):
    """Router and experts."""

    def __init__(self, g: TargetGeometry) -> None:
        super().__init__()
        moe = experts_of(g)
        self.top_k, self.limit = moe.experts_per_token, swiglu_limit(g)
        self.router = nn.Linear(g.hidden, moe.experts)
        self.experts = Experts(g.hidden, moe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x`` [T, H], normed, to [T, H]."""
        return torch_op("Moe")(
            x,
            self.router(x).float(),
            *self.experts.weights(),
            None,
            None,
            top_k=self.top_k,
            limit=self.limit,
        )


def layer_of(g: TargetGeometry, number: int, sizes: GraphSizes) -> Block:
    """Return the block with this number, with attention on keys and values or on latents."""
    attention = LatentAttention if g.latent_dims and g.latent_dims[number] else GroupedAttention
    norms = RmsNorm(g.hidden, g.norm.eps), RmsNorm(g.hidden, g.norm.eps)
    return Block(norms, attention(g, number, sizes), MoeBlock(g))


class GptOss(TargetModel):
    """GPT-OSS in the role ``target``.

    With SpecPV, full-attention layers summarize and choose blocks. With DSA, layers that have an
    indexer choose tokens. Keys computed from latents are rotated when they are read.
    """

    rotates_when_read = True

    def __init__(self, g: TargetGeometry, sizes: GraphSizes) -> None:
        layers = [layer_of(g, number, sizes) for number in range(g.layers)]
        backbone = Backbone(g, layers, RmsNorm(g.hidden, g.norm.eps))
        super().__init__(
            g, sizes.aux_layers, backbone, torch.empty(sizes.positions, g.head_dim // 2)
        )
