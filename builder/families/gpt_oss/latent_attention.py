"""GPT-OSS's attention with latents in the cache, from which keys and values are computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specbuild.builder.families.parts.block_views import choose_blocks
from specbuild.builder.families.parts.graph_io import (
    GroupView,
    LatentPool,
    Launch,
    LayerBlocks,
    LayerIndex,
)
from specbuild.builder.families.parts.indexer import IndexedAttention
from specbuild.builder.families.parts.rope import rotate
from specbuild.builder.families.parts.target import GraphSizes
from specbuild.plugins_cuda.torch_ops import torch_op
from specbuild.runtime.engine_dir.geometry import TargetGeometry


class ProjectionBias(nn.Module):
    """The bias of a projection whose weight a latent replaces."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(width))


class LatentAttention(IndexedAttention):
    """Attention on ``c = x W_c``: keys ``RoPE(c W_k_lat + b_k)``, values ``c W_v_lat + b_v``."""

    def __init__(self, g: TargetGeometry, number: int, sizes: GraphSizes) -> None:
        # SpecPV chooses blocks by cached keys, and here only an indexer caches keys.
        super().__init__(g, number, sizes)
        latent_dim = g.latent_dims[number]
        kv_width = g.kv_heads * g.head_dim
        self.q_proj = nn.Linear(g.hidden, g.q_heads * g.head_dim)
        self.k_proj = ProjectionBias(kv_width)
        self.v_proj = ProjectionBias(kv_width)
        self.mla_W_c = nn.Parameter(torch.empty(g.hidden, latent_dim))
        self.mla_W_k_lat = nn.Parameter(torch.empty(latent_dim, kv_width))
        self.mla_W_v_lat = nn.Parameter(torch.empty(latent_dim, kv_width))
        self.o_proj = nn.Linear(g.q_heads * g.head_dim, g.hidden)
        self.sinks = nn.Parameter(torch.empty(g.q_heads))

    def forward(  # noqa: PLR0917
        self,
        x: torch.Tensor,
        pools: LatentPool,
        view: GroupView,
        launch: Launch,
        tables: Any,
        blocks: LayerBlocks | None = None,
        index: LayerIndex | None = None,
    ) -> tuple[torch.Tensor, LatentPool, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Map ``x`` [T, H], normed, to [T, H], the written pool, and SpecPV's and DSA's outputs."""
        heads = (self.kv_heads, self.head_dim)
        q = rotate(self.q_proj(x), tables, launch.positions, self.q_heads)
        latent = (x @ self.mla_W_c).unsqueeze(1)
        written = LatentPool(torch_op("KvWrite")(pools.c, latent, view.write_slot))
        selected, indexed, index_keys = self.choose_slots(x, index, launch)
        table = 0 if blocks is None else blocks.place
        position = view.page_position
        if blocks is not None and position is not None:
            position = position[table]
        attended = torch_op("MlaAttention")(
            q,
            written.c,
            self.mla_W_k_lat.unflatten(1, heads),
            self.k_proj.bias.view(heads),
            self.mla_W_v_lat.unflatten(1, heads),
            self.v_proj.bias.view(heads),
            *tables,
            view.page_table[table],
            launch.row_start,
            view.row_slot,
            view.tree_start,
            launch.ancestor_bits,
            self.sinks.float(),
            selected,
            position,
            scale=self.head_dim**-0.5,
            window=self.window,
        )
        partial: tuple[torch.Tensor, ...] = ()
        if blocks is not None and self.blocks is not None and index_keys is not None:
            partial = choose_blocks(index_keys, blocks, view, launch, self.blocks)
        return self.o_proj(attended.flatten(1)), written, partial, indexed
