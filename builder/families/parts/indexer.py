"""DSA-lite: attention modules whose layer can select the tokens that it attends to."""

from __future__ import annotations

import torch
from torch import nn

from specbuild.builder.families.parts.block_views import BlockKeys
from specbuild.builder.families.parts.graph_io import Launch, LayerIndex
from specbuild.builder.families.parts.target import GraphSizes
from specbuild.plugins_cuda.torch_ops import torch_op
from specbuild.runtime.engine_dir.geometry import TargetGeometry


class IndexedAttention(nn.Module):
    """The attention of layer ``number``: its window, and its selection of tokens.

    With an indexer it has the indexer's projections, which are not rotated.
    """

    def __init__(self, g: TargetGeometry, number: int, sizes: GraphSizes) -> None:
        super().__init__()
        windowed = g.layer_types[number] == "sliding_attention"
        indexer = g.indexer if g.indexer and number in g.indexer.layers else None
        heads = g.heads_of(number)
        self.q_heads, self.kv_heads, self.head_dim = g.q_heads, heads.kv_heads, heads.head_dim
        self.window = g.sliding_window if windowed else 0
        self.blocks = None if windowed else sizes.blocks
        self.indexer, self.dsa = indexer, sizes.dsa
        if indexer is None:
            return
        self.dsa_W_q = nn.Parameter(torch.empty(g.hidden, indexer.heads * indexer.width))
        self.dsa_W_k = nn.Parameter(torch.empty(g.hidden, indexer.width))
        if indexer.weighted:
            self.dsa_W_h = nn.Parameter(torch.empty(g.hidden, indexer.heads))

    def choose_slots(
        self, x: torch.Tensor, index: LayerIndex | None, launch: Launch
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor, ...], BlockKeys | None]:
        """Return the slots to attend to, [T, N, S] or None, for attention's input ``x`` [T, H].

        Also returns the written pool, and the number of invalid lists of each sequence, [B]. If
        SpecPV selects blocks by indexers, also the weighted queries and keys.
        """
        if index is None or self.indexer is None or self.dsa is None:
            return None, (), None
        view, dsa, heads = index.view, self.dsa, self.indexer.heads
        keys = x @ self.dsa_W_k
        if dsa.key_dtype == "fp8":
            # ONNX's Cast saturates to the largest number.
            keys = keys.to(torch.float8_e4m3fn).to(x.dtype)
        written = torch_op("KvWrite")(index.key_pool, keys.unsqueeze(1), view.write_slot)
        queries = (x @ self.dsa_W_q).unflatten(1, (heads, self.indexer.width))
        weights = x @ self.dsa_W_h if self.indexer.weighted else None
        rows = (launch.row_start, view.row_slot, view.tree_start, launch.ancestor_bits)
        limits = {
            "threshold": dsa.threshold,
            "first_tokens": dsa.first_tokens,
            "recent_tokens": dsa.recent_tokens,
        }
        lists = torch_op("DsaIndexer")(
            queries,
            weights,
            written,
            view.page_table[index.place],
            *rows,
            launch.positions,
            index.budget,
            top_k=dsa.top_k,
            **limits,
        )
        checked, violations = torch_op("DsaCheck")(
            lists, *rows, launch.positions, index.budget, **limits
        )
        weighted_queries = queries if weights is None else queries * weights.unsqueeze(2)
        selects_blocks = self.blocks is not None and self.blocks.config.score == "indexer"
        return (
            checked,
            (written, violations),
            BlockKeys(weighted_queries, written) if selects_blocks else None,
        )
