"""Attention over cached keys and values, shared by several families."""

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
    """Write K and V [T, kv_heads, D] and attend with q [T, Hq, D] → [T, Hq·D], new pools.

    ``table`` is the index of the layer's page table if layers have separate ones. ``selected``
    [T, N, S] restricts rows to selected slots (DSA). ``scale`` multiplies the scores; None is
    ``D^-½``.
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


def scaled_by_position(
    q: torch.Tensor, growth: QueryGrowth, positions: torch.Tensor
) -> torch.Tensor:
    """Multiply queries [T, Hq, D] by the factor of their ``positions`` [T]."""
    steps = (positions.float() / growth.original_max_positions).floor()
    factor = 1 + growth.beta * (1 + steps).log()
    return q * factor.to(q.dtype)[:, None, None]


def _effective_growth(growth: QueryGrowth | None, sizes: GraphSizes) -> QueryGrowth | None:
    """Return None also if the factor is 1 at every position of a sequence."""
    max_length = sizes.longest or sizes.positions
    if growth is None or max_length <= growth.original_max_positions:
        return None
    return growth


class GroupedAttention(IndexedAttention):
    """Grouped-query attention with the optional parts of its geometry."""

    def __init__(self, g: TargetGeometry, number: int, sizes: GraphSizes) -> None:
        super().__init__(g, number, sizes)
        attention, is_full_norm = g.attention, g.attention.qk_norm == "all_heads"
        queries, keys = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        self.caches = number in g.caching_layers
        self.keys_as_values = attention.keys_as_values and not self.window
        self.qk_norm = attention.qk_norm
        self.q_proj = nn.Linear(g.hidden, queries, bias=attention.qkv_bias)
        self.o_proj = nn.Linear(queries, g.hidden, bias=attention.output_bias)
        if self.caches:
            self.k_proj = nn.Linear(g.hidden, keys, bias=attention.qkv_bias)
        if self.caches and not self.keys_as_values:
            self.v_proj = nn.Linear(g.hidden, keys, bias=attention.qkv_bias)
        if attention.qk_norm != "none":
            self.q_norm = norm_module(g.norm, queries if is_full_norm else self.head_dim)
        if attention.qk_norm != "none" and self.caches:
            self.k_norm = norm_module(g.norm, keys if is_full_norm else self.head_dim)
        self.value_eps = g.norm.eps if attention.value_norm else None
        self.scale, self.growth = attention.scale, _effective_growth(attention.query_growth, sizes)
        self.rotates = number not in g.unrotated_layers
        self.rotated = g.rope_of(number).width or 0
        self.sinks = nn.Parameter(torch.empty(g.q_heads)) if attention.sinks else None
        if attention.output_gate:
            self.gate_proj = nn.Linear(g.hidden, queries, bias=False)
        self.output_gate = attention.output_gate

    def forward(  # noqa: PLR0917
        self,
        x: torch.Tensor,
        pools: LayerPools,
        view: GroupView,
        launch: Launch,
        tables: Any,
        blocks: LayerBlocks | None = None,
        index: LayerIndex | None = None,
    ) -> tuple[torch.Tensor, LayerPools | None, tuple[Any, ...], tuple[Any, ...]]:
        """``x`` [T, H], normed → [T, H], the written pools, SpecPV's outputs and DSA's.

        A layer that shares another layer's keys and values receives the pools written by that one.
        """
        q = self._normed_and_rotated(
            self.q_proj(x), "q_norm", self.q_heads, tables, launch.positions
        )
        if self.growth is not None:
            q = scaled_by_position(q, self.growth, launch.positions)
        sinks = None if self.sinks is None else self.sinks.float()
        if not self.caches:
            return self.o_proj(self._attend_only(q, pools, view, launch, sinks)), None, (), ()
        projected = self.k_proj(x)
        k = self._normed_and_rotated(projected, "k_norm", self.kv_heads, tables, launch.positions)
        v = projected if self.keys_as_values else self.v_proj(x)
        v = v.view(-1, self.kv_heads, self.head_dim)
        if self.value_eps is not None:
            v = F.rms_norm(v.float(), (self.head_dim,), eps=self.value_eps).to(v.dtype)
        table = 0 if blocks is None else blocks.place
        selected, indexed, index_keys = self.choose_slots(x, index, launch)
        attended, written = write_and_attend(
            (q, k, v), pools, view, launch, sinks, self.window, table, selected, self.scale
        )
        if self.output_gate:
            attended = attended * self.gate_proj(x).sigmoid()
        partial: tuple[torch.Tensor, ...] = ()
        if blocks is not None and self.blocks is not None:
            keys = index_keys or BlockKeys(q, written.k)
            partial = choose_blocks(keys, blocks, view, launch, self.blocks)
        return self.o_proj(attended), written, partial, indexed

    def _normed_and_rotated(
        self, x: torch.Tensor, norm: str, heads: int, tables: Any, positions: torch.Tensor
    ) -> torch.Tensor:
        """Norm and rotate projected queries or keys [T, heads·D] → [T, heads, D]."""
        if self.qk_norm == "head":
            x = self.get_submodule(norm)(x.unflatten(1, (heads, -1))).flatten(1)
        elif self.qk_norm == "all_heads":
            x = self.get_submodule(norm)(x)
        if self.rotates:
            return rotate(x, tables, positions, heads, self.rotated)
        return x.unflatten(1, (heads, -1))

    def _attend_only(
        self,
        q: torch.Tensor,
        pools: LayerPools,
        view: GroupView,
        launch: Launch,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend with q [T, Hq, D] over the pools of another layer → [T, Hq·D]."""
        attended: torch.Tensor = torch_op("PagedTreeAttention")(
            q,
            pools.k,
            pools.v,
            view.page_table[0],
            launch.row_start,
            view.row_slot,
            view.tree_start,
            launch.ancestor_bits,
            sinks,
            None,
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            window=self.window,
        )
        return attended.flatten(1)
