"""GPT-OSS: grouped-query attention with sinks, and experts in every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from specbuild.builder.families.parts.block_views import BlockKeys, choose_blocks
from specbuild.builder.families.parts.graph_io import (
    GroupView,
    Launch,
    LayerBlocks,
    LayerIndex,
    LayerPools,
)
from specbuild.builder.families.parts.indexer import IndexedAttention
from specbuild.builder.families.parts.latent_attention import LatentAttention
from specbuild.builder.families.parts.rope import rotate
from specbuild.builder.families.parts.target import Backbone, Block, TargetModel
from specbuild.plugins_cuda.torch_ops import torch_op
from specbuild.runtime.engine_dir.manifest import Dsa, IndexerGeometry, TargetGeometry
from specbuild.runtime.lossy.specpv.state import ViewGeometry


class RmsNorm(nn.Module):
    """GPT-OSS's norm: fp32 inside, multiplied by the weight in fp32 before the cast back."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, H] → [T, H]."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def write_and_attend(  # noqa: PLR0917
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pools: LayerPools,
    view: GroupView,
    launch: Launch,
    sinks: torch.Tensor | None,
    window: int,
    table: int = 0,
    selected: torch.Tensor | None = None,
) -> tuple[torch.Tensor, LayerPools]:
    """Writes K and V [T, kv_heads, D] and attends with q [T, Hq, D] → [T, Hq·D], new pools.

    ``table`` is the layer's among the group's page tables, where it has one of its own;
    ``selected`` [T, N, S] narrows rows to some slots (DSA).
    """
    q, k, v = qkv
    write = torch_op("KvWrite")
    written = LayerPools(
        write(pools.k, k, view.write_slot),
        write(pools.v, v, view.write_slot),
    )
    attended = torch_op("PagedTreeAttention")(
        q,
        written.k,
        written.v,
        view.page_table[table],
        launch.row_start,
        view.row_slot,
        view.tree_start,
        launch.ancestor_bits,
        sinks,
        selected,
        scale=q.shape[-1] ** -0.5,
        window=window,
    )
    return attended.flatten(1), written


class Attention(IndexedAttention):
    """Grouped-query attention with biases and one learned sink per query head."""

    def __init__(
        self,
        g: TargetGeometry,
        window: int,
        blocks: ViewGeometry | None = None,
        indexer: IndexerGeometry | None = None,
        dsa: Dsa | None = None,
    ) -> None:
        super().__init__(g.hidden, blocks, indexer, dsa)
        self.geometry, self.window = g, window
        self.q_proj = nn.Linear(g.hidden, g.q_heads * g.head_dim)
        self.k_proj = nn.Linear(g.hidden, g.kv_heads * g.head_dim)
        self.v_proj = nn.Linear(g.hidden, g.kv_heads * g.head_dim)
        self.o_proj = nn.Linear(g.q_heads * g.head_dim, g.hidden)
        self.sinks = nn.Parameter(torch.empty(g.q_heads))

    def forward(  # noqa: PLR0917
        self,
        x: torch.Tensor,
        pools: LayerPools,
        view: GroupView,
        launch: Launch,
        tables: Any,
        blocks: LayerBlocks | None = None,
        index: LayerIndex | None = None,
    ) -> tuple[torch.Tensor, LayerPools, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """``x`` [T, H], normed → [T, H], the written pools, SpecPV's part and DSA's."""
        g = self.geometry
        q = rotate(self.q_proj(x), tables, launch.positions, g.q_heads)
        k = rotate(self.k_proj(x), tables, launch.positions, g.kv_heads)
        v = self.v_proj(x).view(-1, g.kv_heads, g.head_dim)
        sinks = self.sinks.float()
        place = 0 if blocks is None else blocks.place
        selected, indexed, index_keys = self.choose_slots(x, index, launch)
        attended, written = write_and_attend(
            (q, k, v), pools, view, launch, sinks, self.window, place, selected
        )
        partial: tuple[torch.Tensor, ...] = ()
        if blocks is not None and self.blocks is not None:
            keys = index_keys or BlockKeys(q, written.k)
            partial = choose_blocks(keys, blocks, view, launch, self.blocks)
        return self.o_proj(attended), written, partial, indexed


class Experts(nn.Module):
    """The expert weights, as MXFP4 blocks and scales or as plain [E, in, out] matrices."""

    def __init__(self, g: TargetGeometry) -> None:
        super().__init__()
        experts, hidden, inner = g.experts, g.hidden, g.expert_inner
        self.format = g.expert_format
        if self.format == "mxfp4":
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
        blank = torch.empty(shape, dtype=torch.uint8)
        self.register_parameter(name, nn.Parameter(blank, requires_grad=False))

    def weights(self) -> tuple[Any, ...]:
        """The six weight inputs of the op ``Moe``, in its order."""
        if self.format == "mxfp4":
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
        self.geometry = g
        self.router = nn.Linear(g.hidden, g.experts)
        self.experts = Experts(g)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, H], normed → [T, H]."""
        return torch_op("Moe")(
            x,
            self.router(x).float(),
            *self.experts.weights(),
            None,
            top_k=self.geometry.experts_per_token,
            limit=self.geometry.swiglu_limit,
        )


def layer_of(
    g: TargetGeometry, number: int, blocks: ViewGeometry | None = None, dsa: Dsa | None = None
) -> Block:
    """The block of this number, its attention over keys and values or over a latent."""
    window = g.sliding_window if g.layer_types[number] == "sliding_attention" else 0
    latent_dim = g.latent_dims[number] if g.latent_dims else 0
    indexer = g.indexer if g.indexer and number in g.indexer.layers else None
    attention = (
        LatentAttention(g, window, latent_dim, None if window else blocks, indexer, dsa)
        if latent_dim
        else Attention(g, window, None if window else blocks, indexer, dsa)
    )
    norms = RmsNorm(g.hidden, g.rms_eps), RmsNorm(g.hidden, g.rms_eps)
    return Block(norms, attention, MoeBlock(g))


class GptOss(TargetModel):
    """GPT-OSS in the role ``target``.

    With ``blocks`` its full-attention layers summarise and choose blocks (SpecPV); with ``dsa``
    those that have an indexer choose tokens.
    """

    def __init__(
        self,
        g: TargetGeometry,
        taps: tuple[int, ...],
        max_positions: int,
        blocks: ViewGeometry | None = None,
        dsa: Dsa | None = None,
    ) -> None:
        layers = [layer_of(g, number, blocks, dsa) for number in range(g.layers)]
        backbone = Backbone(g, layers, RmsNorm(g.hidden, g.rms_eps))
        super().__init__(g, taps, backbone, torch.empty(max_positions, g.head_dim // 2))
