"""An assistant of Gemma 4 as a recurrent draft over the target's keys and values.

``u = W_pre [embedding of the token; h]``, the decoder's layers attend with u to the target's
caches, ``y = norm(layers(u))``, the head reads y, and the next h is ``W_post y``. The first h is
the target's state after its final norm, and the first token the newest one. All levels have its
position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from specbuild.builder.families.gemma4.model import Gemma4Model
from specbuild.builder.families.parts.draft_modules import TargetEmbedding
from specbuild.builder.families.parts.graph_io import GroupView, Launch, LayerPools
from specbuild.builder.families.parts.target import GraphSizes
from specbuild.runtime.engine_dir.drafters.gemma4_assistant import AssistantGeometry
from specbuild.runtime.engine_dir.geometry import Multipliers, TargetGeometry

# The logit of tokens that the head does not read.
UNREAD_LOGIT = -1e9


class ClusteredHead(nn.Module):
    """A head that computes the logits of the clusters whose centroids are nearest to a row."""

    def __init__(self, d: AssistantGeometry) -> None:
        super().__init__()
        self.read = d.read_clusters
        self.centroids = nn.Linear(d.decoder.hidden, d.clusters, bias=False)
        self.token_ordering = nn.Buffer(torch.empty(d.vocab, dtype=torch.int32))

    def forward(self, x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """``x`` [R, Hd] and the rows ``head`` [V, Hd] of all tokens → logits [R, V], fp32."""
        nearest = self.centroids(x).topk(self.read, dim=-1).indices
        by_cluster = self.token_ordering.long().view(self.centroids.out_features, -1)
        tokens = F.embedding(nearest, by_cluster).flatten(1)
        rows = F.embedding(tokens, head)
        read = torch.matmul(rows, x.unsqueeze(2)).squeeze(2).float()
        size = (x.shape[0], head.shape[0])
        unread = x.new_full(size, UNREAD_LOGIT, dtype=torch.float32)
        return unread.scatter(1, tokens, read)


class _Decoder(nn.Module):
    """The layers with the names of their checkpoint; engines store them with ``draft.``."""

    def __init__(self, d: AssistantGeometry, model: Gemma4Model) -> None:
        super().__init__()
        self.layers, self.norm = model.model.layers, model.model.norm
        self.lm_head = model.lm_head
        # The two halves of pre_projection, which reads the embedding and then the state.
        self.embedding_projection = nn.Linear(d.hidden, d.decoder.hidden, bias=False)
        self.state_projection = nn.Linear(d.hidden, d.decoder.hidden, bias=False)
        self.post_projection = nn.Linear(d.decoder.hidden, d.hidden, bias=False)
        if d.clusters:
            self.masked_embedding = ClusteredHead(d)


class Assistant(nn.Module):
    """The role ``draft``: one level of drafting."""

    def __init__(self, d: AssistantGeometry, target: TargetGeometry, max_positions: int) -> None:
        super().__init__()
        self.geometry, self.factor = d, (target.multipliers or Multipliers()).embedding
        decoder = Gemma4Model(d.decoder, GraphSizes((), max_positions))
        self.draft, self.model = _Decoder(d, decoder), TargetEmbedding(target)
        self.register_buffer("draft_rope_cos", decoder.rope_cos)
        self.register_buffer("draft_rope_sin", decoder.rope_sin)
        if d.decoder.window_rope is not None:
            self.register_buffer("draft_window_rope_cos", decoder.window_rope_cos)
            self.register_buffer("draft_window_rope_sin", decoder.window_rope_sin)
        read = [target.layer_types[layer] for layer in d.target_layers(target)]
        self.places = [read.index(kind) for kind in d.decoder.layer_types]

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        launch: Launch,
        views: tuple[GroupView, ...],
        pools: tuple[LayerPools, ...],
    ) -> tuple[Any, ...]:
        """Run rows with tokens [T] and states ``hidden`` [T, H] over the target's caches.

        ``views`` and ``pools`` are those of the target's layers that the draft reads. Returns
        draft_logits [R, V] fp32, hidden_out [T, H] (the recurrence), and the stages attention and
        ffn of the last layer, and pre_head.
        """
        embedded = self.model.embed_tokens(token_ids) * self.factor
        x = self.draft.embedding_projection(embedded) + self.draft.state_projection(hidden)
        layers: Any = self.draft.layers
        attention = ffn = x
        for number, (layer, place) in enumerate(zip(layers, self.places, strict=True)):
            attended, *_ = layer.self_attn(
                layer.input_layernorm(x), pools[place], views[place], launch, self._tables(number)
            )
            attention = layer.post_attention_layernorm(attended)
            x = x + attention
            ffn = layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
            x = layer.finalize(x + ffn, None)
        normed = self.draft.norm(x)
        pre_head = normed.index_select(0, launch.logit_rows)
        if self.geometry.clusters:
            logits = self.draft.masked_embedding(pre_head, self.draft.lm_head.weight)
        else:
            logits = self.draft.lm_head(pre_head).float()
        return logits, self.draft.post_projection(normed), attention, ffn, pre_head

    def _tables(self, layer: int) -> Any:
        decoder = self.geometry.decoder
        if decoder.window_rope is not None and decoder.layer_types[layer] == "sliding_attention":
            return self.draft_window_rope_cos, self.draft_window_rope_sin
        return self.draft_rope_cos, self.draft_rope_sin
