"""The parts of every target: blocks on a residual stream, as one ragged graph of role ``target``.

Prefill chunks, plain decode and tree verification share the graph. Parameter names are those of
Hugging Face checkpoints. Modules are created on the meta device for the export, without weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specbuild.builder.families.parts.graph_io import (
    BlockView,
    GroupView,
    Launch,
    LayerBlocks,
    LayerIndex,
    Pools,
    StateView,
)
from specbuild.runtime.engine_dir.geometry import Multipliers, NormPlaces, TargetGeometry
from specbuild.runtime.engine_dir.manifest import Dsa
from specbuild.runtime.lossy.specpv.state import ViewGeometry


@dataclass(frozen=True)
class GraphSizes:
    """The sizes of a target's graph.

    ``aux_layers`` are the 0-based layers whose outputs are the aux hidden states. ``positions`` is
    the length of the rotary tables. ``blocks`` configures the selection of blocks (SpecPV), ``dsa``
    that of tokens. ``longest`` is the maximum sequence length, 0 for ``positions``; results of rows
    after it are discarded.
    """

    aux_layers: tuple[int, ...]
    positions: int
    blocks: ViewGeometry | None = None
    dsa: Dsa | None = None
    longest: int = 0


# The names of a block's norms by placement: before and after attention, then before and after the
# feed-forward.
BLOCK_NORMS: dict[NormPlaces, tuple[str | None, ...]] = {
    "inputs": ("input_layernorm", None, "post_attention_layernorm", None),
    "outputs": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


class Block(nn.Module):
    """One transformer block: attention and a feed-forward, each with its norms.

    ``norms`` are those of :data:`BLOCK_NORMS` for ``places``, in its order. ``residual`` multiplies
    the outputs before they are added. ``attention_name`` is the name of attention in checkpoints.
    """

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    self_attn: nn.Module

    def __init__(
        self,
        norms: Sequence[nn.Module],
        attention: nn.Module,
        mlp: nn.Module,
        *,
        places: NormPlaces = "inputs",
        residual: float = 1.0,
        attention_name: str = "self_attn",
    ) -> None:
        super().__init__()
        self.places, self.residual = places, residual
        self.attention_name = attention_name
        names = [name for name in BLOCK_NORMS[places] if name is not None]
        for name, norm in zip(names, norms, strict=True):
            self.add_module(name, norm)
        self.add_module(attention_name, attention)
        self.mlp = mlp

    def forward(  # noqa: PLR0917
        self,
        x: torch.Tensor,
        pools: Pools,
        view: GroupView | StateView,
        launch: Launch,
        tables: Any,
        blocks: LayerBlocks | None = None,
        index: LayerIndex | None = None,
        layer_input: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, *tuple[Any, ...]]:
        """Return the residual stream ``x`` [T, H] after the block, and attention's other outputs.

        ``layer_input`` [T, W] is for blocks of models with ``layer_inputs``.
        """
        before, after, mlp_before, mlp_after = BLOCK_NORMS[self.places]
        attended, *others = self.get_submodule(self.attention_name)(
            self._normed(before, x), pools, view, launch, tables, blocks, index
        )
        x = self._added(x, self._normed(after, attended))
        ff_output = self.feed_forward(x, self._normed(mlp_before, x))
        x = self._added(x, self._normed(mlp_after, ff_output))
        return self.finalize(x, layer_input), *others

    def feed_forward(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Return the feed-forward's output for the stream ``x`` [T, H] and its norm ``normed``."""
        del x
        output: torch.Tensor = self.mlp(normed)
        return output

    def finalize(self, x: torch.Tensor, layer_input: torch.Tensor | None) -> torch.Tensor:
        """Return the next block's input for the stream ``x`` [T, H] after the feed-forward."""
        del layer_input
        return x

    def _normed(self, name: str | None, x: torch.Tensor) -> torch.Tensor:
        if name is None:
            return x
        normed: torch.Tensor = self.get_submodule(name)(x)
        return normed

    def _added(self, x: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        return x + change if self.residual == 1 else x + change * self.residual


class Backbone(nn.Module):
    """Embedding, blocks and the final norm, with the names of the checkpoint."""

    def __init__(self, g: TargetGeometry, layers: Iterable[Block], norm: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(g.vocab, g.hidden)
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class TargetModel(nn.Module):
    """The role ``target``; ``aux_layers`` are the 0-based layers of the aux hidden states.

    With ``rotates_when_read`` keys in a latent cache are rotated when they are read, and attention
    receives the position of each page.
    """

    rotates_when_read = False
    rope_cos: torch.Tensor
    rope_sin: torch.Tensor

    def __init__(
        self,
        g: TargetGeometry,
        aux_layers: tuple[int, ...],
        backbone: Backbone,
        rope_table: torch.Tensor,
    ) -> None:
        """``rope_table`` [positions, D / 2] has the shape of the cosines and sines.

        If layers with a window have another RoPE, there is a second pair of tables.
        """
        super().__init__()
        self.geometry, self.aux_layers = g, aux_layers
        self.model = backbone
        self.lm_head = nn.Linear(g.hidden, g.vocab, bias=False)
        self.register_buffer("rope_cos", rope_table)
        self.register_buffer("rope_sin", rope_table.clone())
        if g.window_rope is not None:
            heads = g.window_heads or g
            width = g.window_rope.width or heads.head_dim
            self.window_rope_cos = nn.Buffer(rope_table.new_empty(len(rope_table), width // 2))
            self.window_rope_sin = nn.Buffer(torch.empty_like(self.window_rope_cos))

    def tables_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines of this layer."""
        g = self.geometry
        if g.window_rope is not None and g.layer_types[layer] == "sliding_attention":
            return self.window_rope_cos, self.window_rope_sin
        return self.rope_cos, self.rope_sin

    def layer_inputs(self, token_ids: torch.Tensor, x: torch.Tensor) -> Sequence[Any]:
        """Return each layer's additional input for tokens [T] embedded as ``x`` [T, H]."""
        del token_ids, x
        return (None,) * self.geometry.layers

    def forward(  # noqa: PLR0917
        self,
        token_ids: torch.Tensor,
        launch: Launch,
        views: tuple[Any, ...],
        pools: tuple[Pools, ...],
        asked: BlockView | None = None,
        summaries: tuple[torch.Tensor, ...] = (),
        budget: torch.Tensor | None = None,
        key_pools: tuple[torch.Tensor, ...] = (),
        *,
        group_of_layer: tuple[int, ...],
    ) -> tuple[Any, ...]:
        """``token_ids`` [T] → logits [R, V] fp32, aux_hidden [T, aux_layers·H], new pools, stages.

        ``views[group_of_layer[i]]`` is the view of layer i: of pages, or of recurrent states. With
        SpecPV, ``summaries`` of the full-attention layers are also returned after the pools,
        followed by the partial tables [Lg, B, kv_heads, V]. With DSA, the last of ``views`` is the
        indexers'; their pools and the number of invalid lists per layer and sequence, [Lg, B],
        are returned last. The stages are the residual stream after every layer and the final norm.
        Engines do not return them, but keep their names for ``verify``.
        """
        multipliers = self.geometry.multipliers or Multipliers()
        x = self.model.embed_tokens(token_ids)
        if multipliers.embedding != 1:
            x = x * multipliers.embedding
        layer_inputs = self.layer_inputs(token_ids, x)
        written: list[Any] = []
        stages = []
        selections: list[torch.Tensor] = []
        indexed: list[torch.Tensor] = []
        tables_used = [0] * len(views)
        layers: Any = self.model.layers
        for number, (layer, layer_pools, group) in enumerate(
            zip(layers, pools, group_of_layer, strict=True)
        ):
            blocks = index = None
            if asked is not None and layer.self_attn.blocks is not None:
                position = len(selections)
                blocks = LayerBlocks(
                    tables_used[group], asked, summaries[position], asked.partial_table[position]
                )
                tables_used[group] += 1
            if budget is not None and layer.self_attn.indexer is not None:
                position = 0 if asked is None else len(indexed)
                index = LayerIndex(position, views[-1], budget, key_pools[len(indexed)])
            source = self.geometry.cache_layer(number)
            x, new, partial, keyed = layer(
                x,
                layer_pools if source == number else written[source],
                views[group],
                launch,
                self.tables_of(number),
                blocks,
                index,
                layer_inputs[number],
            )
            if partial:
                selections.append(partial)
            if keyed:
                indexed.append(keyed)
            written.append(new)
            stages.append(x)
        pre_head = self.model.norm(x.index_select(0, launch.logit_rows))
        logits = self.lm_head(pre_head)
        if multipliers.logits_divisor != 1:
            logits = logits / multipliers.logits_divisor
        logits = logits.float()
        if multipliers.logits_cap:
            logits = multipliers.logits_cap * (logits / multipliers.logits_cap).tanh()
        aux_hidden = (
            [torch.cat([stages[aux_layer] for aux_layer in self.aux_layers], dim=-1)]
            if self.aux_layers
            else []
        )
        new_summaries = [summary for summary, _ in selections]
        new_tables = [torch.stack([table for _, table in selections])] if selections else []
        others = [(*new_summaries, *new_tables)] if selections else []
        if indexed:
            violation_counts = torch.stack([violations for _, violations in indexed])
            others.append((*[pool for pool, _ in indexed], violation_counts))
        new_pools = tuple(new for new in written if new is not None)
        return logits, *aux_hidden, new_pools, *others, tuple(stages), pre_head
