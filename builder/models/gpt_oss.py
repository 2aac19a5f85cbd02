"""GPT-OSS as one ragged graph: prefill chunks, plain decode and tree verification alike.

Parameter names are those of the Hugging Face checkpoint. The module is made on the meta device
and exported; it holds no weights of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from specbuild.builder.models.block_views import BlockKeys, choose_blocks
from specbuild.builder.models.graph_io import (
    BlockView,
    GroupView,
    LatentPool,
    Launch,
    LayerBlocks,
    LayerIndex,
    LayerPools,
)
from specbuild.builder.models.indexer import IndexedAttention
from specbuild.builder.models.latent_attention import LatentAttention
from specbuild.builder.models.rope import rotate
from specbuild.plugins_cuda.torch_ops import torch_op
from specbuild.runtime.manifest import Dsa, IndexerGeometry, TargetGeometry
from specbuild.runtime.specpv import ViewGeometry


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
            top_k=self.geometry.experts_per_token,
            limit=self.geometry.swiglu_limit,
        )


class Layer(nn.Module):
    """One transformer block."""

    def __init__(
        self,
        g: TargetGeometry,
        number: int,
        blocks: ViewGeometry | None = None,
        dsa: Dsa | None = None,
    ) -> None:
        super().__init__()
        window = g.sliding_window if g.layer_types[number] == "sliding_attention" else 0
        latent_dim = g.latent_dims[number] if g.latent_dims else 0
        indexer = g.indexer if g.indexer and number in g.indexer.layers else None
        self.input_layernorm = RmsNorm(g.hidden, g.rms_eps)
        self.self_attn = (
            LatentAttention(g, window, latent_dim, None if window else blocks, indexer, dsa)
            if latent_dim
            else Attention(g, window, None if window else blocks, indexer, dsa)
        )
        self.post_attention_layernorm = RmsNorm(g.hidden, g.rms_eps)
        self.mlp = MoeBlock(g)

    def forward(  # noqa: PLR0917
        self,
        x: torch.Tensor,
        pools: LayerPools | LatentPool,
        view: GroupView,
        launch: Launch,
        tables: Any,
        blocks: LayerBlocks | None = None,
        index: LayerIndex | None = None,
    ) -> tuple[torch.Tensor, *tuple[Any, ...]]:
        """The residual stream ``x`` [T, H] after the block, and what attention gave beside it."""
        attended, *beside = self.self_attn(
            self.input_layernorm(x), pools, view, launch, tables, blocks, index
        )
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), *beside


class Backbone(nn.Module):
    """Embedding, blocks and the final norm, under the names of the checkpoint."""

    def __init__(
        self, g: TargetGeometry, blocks: ViewGeometry | None = None, dsa: Dsa | None = None
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(g.vocab, g.hidden)
        self.layers = nn.ModuleList(Layer(g, number, blocks, dsa) for number in range(g.layers))
        self.norm = RmsNorm(g.hidden, g.rms_eps)


class GptOss(nn.Module):
    """The role ``target``. ``taps`` are the layers whose outputs are captured (0-based).

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
        super().__init__()
        self.geometry, self.taps = g, taps
        self.model = Backbone(g, blocks, dsa)
        self.lm_head = nn.Linear(g.hidden, g.vocab, bias=False)
        table = torch.empty(max_positions, g.head_dim // 2)
        self.register_buffer("rope_cos", table)
        self.register_buffer("rope_sin", table.clone())

    def forward(  # noqa: PLR0917
        self,
        token_ids: torch.Tensor,
        launch: Launch,
        views: tuple[GroupView, ...],
        pools: tuple[LayerPools | LatentPool, ...],
        asked: BlockView | None = None,
        summaries: tuple[torch.Tensor, ...] = (),
        budget: torch.Tensor | None = None,
        key_pools: tuple[torch.Tensor, ...] = (),
        *,
        group_of_layer: tuple[int, ...],
    ) -> tuple[Any, ...]:
        """``token_ids`` [T] → logits [R, V] fp32, captured [T, taps·H], new pools, stages.

        With SpecPV, ``summaries`` of the full-attention layers in order go in, and come out behind
        the pools, followed by the partial tables [Lg, B, kv_heads, V]. With DSA, the last of
        ``views`` is the indexers'; behind all of these come their pools, and by layer and sequence
        how many lists broke an invariant, [Lg, B].

        The stages are the residual stream after every layer and the normed final one; they are
        not outputs of an engine, but keep their names in it for ``verify``.
        """
        x = self.model.embed_tokens(token_ids)
        tables = (self.rope_cos, self.rope_sin)
        written, stages, chosen, indexed = [], [], [], []
        tables_used = [0] * len(views)
        for layer, layer_pools, group in zip(self.model.layers, pools, group_of_layer, strict=True):
            blocks = index = None
            if asked is not None and layer.self_attn.blocks is not None:
                place = len(chosen)
                blocks = LayerBlocks(
                    tables_used[group], asked, summaries[place], asked.partial_table[place]
                )
                tables_used[group] += 1
            if budget is not None and layer.self_attn.indexer is not None:
                place = 0 if asked is None else len(indexed)
                index = LayerIndex(place, views[-1], budget, key_pools[len(indexed)])
            x, new, partial, keyed = layer(
                x, layer_pools, views[group], launch, tables, blocks, index
            )
            if partial:
                chosen.append(partial)
            if keyed:
                indexed.append(keyed)
            written.append(new)
            stages.append(x)
        pre_head = self.model.norm(x.index_select(0, launch.logit_rows))
        logits = self.lm_head(pre_head).float()
        captured = [torch.cat([stages[tap] for tap in self.taps], dim=-1)] if self.taps else []
        new_summaries = [summary for summary, _ in chosen]
        new_tables = [torch.stack([table for _, table in chosen])] if chosen else []
        beside = [(*new_summaries, *new_tables)] if chosen else []
        if indexed:
            broken = torch.stack([violations for _, violations in indexed])
            beside.append((*[pool for pool, _ in indexed], broken))
        return logits, *captured, tuple(written), *beside, tuple(stages), pre_head
