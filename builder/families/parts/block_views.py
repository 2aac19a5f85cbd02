"""SpecPV inside a layer: blocks of its keys are summarised, and the best make a partial view."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specbuild.builder.families.parts.graph_io import GroupView, Launch, LayerBlocks
from specbuild.plugins_cuda.torch_ops import torch_op
from specbuild.runtime.lossy.specpv.state import ViewGeometry


class BlockKeys(NamedTuple):
    """What blocks are chosen by: queries [T, heads, D], and a pool of the keys that they meet."""

    queries: torch.Tensor
    pool: torch.Tensor


def summarise(k_pool: torch.Tensor, blocks: LayerBlocks, geometry: ViewGeometry) -> torch.Tensor:
    """The layer's summaries with those of its new whole blocks."""
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
    """The layer's summaries, and its partial tables [B, kv_heads, V], new where asked for."""
    asked, score = blocks.view, geometry.config.score
    summary_pool = summarise(keys.pool, blocks, geometry)
    table: torch.Tensor = torch_op("KvBlockSelect")(
        keys.queries,
        summary_pool,
        asked.logical_pages,
        launch.row_start,
        view.row_slot,
        view.tree_start,
        asked.tree_count,
        asked.blocks,
        asked.budget,
        blocks.partial_table,
        sink_pages=geometry.sink_pages,
        block_pages=geometry.block_pages,
        reduction=geometry.config.reduction,
        # An indexer's score grows with the product of each head: the larger one bounds a block's.
        score="quest" if score == "indexer" else score,
    )
    return summary_pool, table
