"""SpecPV within a layer: summarizes blocks of keys and selects the best ones for a view."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specbuild.builder.families.parts.graph_io import GroupView, Launch, LayerBlocks
from specbuild.plugins_cuda.torch_ops import torch_op
from specbuild.runtime.lossy.specpv.state import ViewGeometry


class BlockKeys(NamedTuple):
    """The inputs of block selection: queries [T, heads, D] and the pool of their keys."""

    queries: torch.Tensor
    pool: torch.Tensor


def summarise(k_pool: torch.Tensor, blocks: LayerBlocks, geometry: ViewGeometry) -> torch.Tensor:
    """Return the layer's summaries, updated by its new full blocks."""
    view = blocks.view
    summary: torch.Tensor = torch_op("KvBlockSummary")(
        blocks.summary_pool,
        k_pool,
        view.logical_pages,
        view.first_block,
        view.blocks,
        sink_pages=geometry.sink_pages,
        block_pages=geometry.block_pages,
    )
    return summary


def choose_blocks(
    keys: BlockKeys,
    blocks: LayerBlocks,
    view: GroupView,
    launch: Launch,
    geometry: ViewGeometry,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer's summaries and partial tables [B, kv_heads, V], updated as requested."""
    block_view, score = blocks.view, geometry.config.score
    summary_pool = summarise(keys.pool, blocks, geometry)
    table: torch.Tensor = torch_op("KvBlockSelect")(
        keys.queries,
        summary_pool,
        block_view.logical_pages,
        launch.row_start,
        view.row_slot,
        view.tree_start,
        block_view.tree_count,
        block_view.blocks,
        block_view.budget,
        blocks.partial_table,
        sink_pages=geometry.sink_pages,
        block_pages=geometry.block_pages,
        reduction=geometry.config.reduction,
        # An indexer's score grows with each head's product, so the maximum is an upper bound.
        score="quest" if score == "indexer" else score,
    )
    return summary_pool, table
