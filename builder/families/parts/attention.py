"""Attention over cached keys and values, as several families have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specbuild.builder.families.parts.block_views import BlockKeys, choose_blocks
from specbuild.builder.families.parts.graph_io import (
    GroupView,
    Launch,
    LayerBlocks,
    LayerIndex,
    LayerPools,
)
from specbuild.builder.families.parts.indexer import IndexedAttention
from specbuild.builder.families.parts.llama import norm_module
from specbuild.builder.families.parts.rope import rotate
from specbuild.builder.families.parts.target import GraphSizes
from specbuild.plugins_cuda.torch_ops import torch_op
from specbuild.runtime.engine_dir.geometry import QueryGrowth, TargetGeometry


def write_and_attend(  # noqa: PLR0917
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pools: LayerPools,
    view: GroupView,
    launch: Launch,
    sinks: torch.Tensor | None,
    window: int,
    table: int = 0,
    selected: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, LayerPools]:
    """Writes K and V [T, kv_heads, D] and attends with q [T, Hq, D] → [T, Hq·D], new pools.

    ``table`` is the layer's among the group's page tables, where it has one of its own;
    ``selected`` [T, N, S] restricts rows to some slots (DSA). ``scale`` multiplies the scores,
    None: ``D^-½``.
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
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
    )
    return attended.flatten(1), written


def grown(q: torch.Tensor, growth: QueryGrowth, positions: torch.Tensor) -> torch.Tensor:
    """Queries [T, Hq, D] times the factor of their ``positions`` [T]."""
    steps = (positions.float() / growth.original_max_positions).floor()
    factor = 1 + growth.beta * (1 + steps).log()
    return q * factor.to(q.dtype)[:, None, None]


class GroupedAttention(IndexedAttention):
    """Grouped-query attention, with the parts that its geometry has."""

    def __init__(self, g: TargetGeometry, number: int, sizes: GraphSizes) -> None:
        super().__init__(g, number, sizes)
        parts = g.attention
        self.q_proj = nn.Linear(g.hidden, g.q_heads * g.head_dim, bias=parts.qkv_bias)
        self.k_proj = nn.Linear(g.hidden, g.kv_heads * g.head_dim, bias=parts.qkv_bias)
        self.v_proj = nn.Linear(g.hidden, g.kv_heads * g.head_dim, bias=parts.qkv_bias)
        self.o_proj = nn.Linear(g.q_heads * g.head_dim, g.hidden, bias=parts.output_bias)
        self.qk_norm = parts.qk_norm
        if parts.qk_norm != "none":
            whole = parts.qk_norm == "all_heads"
            self.q_norm = norm_module(g.norm, g.head_dim * (g.q_heads if whole else 1))
            self.k_norm = norm_module(g.norm, g.head_dim * (g.kv_heads if whole else 1))
        self.scale, self.growth = parts.scale, parts.query_growth
        self.rotates = number not in g.unrotated_layers
        self.rotated = g.rope_of(number).width or 0
        self.sinks = nn.Parameter(torch.empty(g.q_heads)) if parts.sinks else None
        if parts.output_gate:
            self.gate_proj = nn.Linear(g.hidden, g.q_heads * g.head_dim, bias=False)
        self.output_gate = parts.output_gate

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
        q, k = self.q_proj(x), self.k_proj(x)
        if self.qk_norm == "head":
            q = self.q_norm(q.unflatten(1, (self.q_heads, -1))).flatten(1)
            k = self.k_norm(k.unflatten(1, (self.kv_heads, -1))).flatten(1)
        elif self.qk_norm == "all_heads":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            q = rotate(q, tables, launch.positions, self.q_heads, self.rotated)
            k = rotate(k, tables, launch.positions, self.kv_heads, self.rotated)
        else:
            q = q.unflatten(1, (self.q_heads, -1))
            k = k.unflatten(1, (self.kv_heads, -1))
        if self.growth is not None:
            q = grown(q, self.growth, launch.positions)
        v = self.v_proj(x).view(-1, self.kv_heads, self.head_dim)
        sinks = None if self.sinks is None else self.sinks.float()
        place = 0 if blocks is None else blocks.place
        selected, indexed, index_keys = self.choose_slots(x, index, launch)
        attended, written = write_and_attend(
            (q, k, v), pools, view, launch, sinks, self.window, place, selected, self.scale
        )
        if self.output_gate:
            attended = attended * self.gate_proj(x).sigmoid()
        partial: tuple[torch.Tensor, ...] = ()
        if blocks is not None and self.blocks is not None:
            keys = index_keys or BlockKeys(q, written.k)
            partial = choose_blocks(keys, blocks, view, launch, self.blocks)
        return self.o_proj(attended), written, partial, indexed
