"""The EAGLE3 draft (arXiv 2503.01840): layers that predict the target's next hidden state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from specbuild.builder.families.parts.attention import write_and_attend
from specbuild.builder.families.parts.graph_io import GroupView, LatentPool, Launch, LayerPools
from specbuild.builder.families.parts.llama import LlamaNorm, SwigluMlp
from specbuild.builder.families.parts.mla import EngineMlaAttention
from specbuild.builder.families.parts.rope import rotate
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry


class DraftAttention(nn.Module):
    """The attention of a layer that reads ``width`` values per row."""

    def __init__(self, d: Eagle3Geometry, width: int) -> None:
        super().__init__()
        self.geometry = d
        parts = d.attention
        self.q_proj = nn.Linear(width, d.q_heads * d.head_dim, bias=parts.qkv_bias)
        self.k_proj = nn.Linear(width, d.kv_heads * d.head_dim, bias=parts.qkv_bias)
        self.v_proj = nn.Linear(width, d.kv_heads * d.head_dim, bias=parts.qkv_bias)
        self.o_proj = nn.Linear(d.q_heads * d.head_dim, d.hidden, bias=parts.output_bias)
        if parts.qk_norm == "head":
            self.q_norm = LlamaNorm(d.head_dim, d.rms_eps)
            self.k_norm = LlamaNorm(d.head_dim, d.rms_eps)

    def forward(
        self, u: torch.Tensor, pools: LayerPools, view: GroupView, launch: Launch, tables: Any
    ) -> tuple[torch.Tensor, LayerPools]:
        """``u`` [T, width] → [T, H] and the written pools."""
        d = self.geometry
        q, k = self.q_proj(u), self.k_proj(u)
        if d.attention.qk_norm == "head":
            q = self.q_norm(q.unflatten(1, (d.q_heads, -1))).flatten(1)
            k = self.k_norm(k.unflatten(1, (d.kv_heads, -1))).flatten(1)
        q = rotate(q, tables, launch.positions, d.q_heads)
        k = rotate(k, tables, launch.positions, d.kv_heads)
        v = self.v_proj(u).view(-1, d.kv_heads, d.head_dim)
        attended, written = write_and_attend((q, k, v), pools, view, launch, None, d.sliding_window)
        return self.o_proj(attended), written


class DraftLayer(nn.Module):
    """A block whose attention reads ``width`` values per row, with the names of checkpoints."""

    def __init__(self, d: Eagle3Geometry, width: int) -> None:
        super().__init__()
        self.self_attn: nn.Module = DraftAttention(d, width)
        if d.mla is not None:
            self.self_attn = EngineMlaAttention(d.hidden, d.q_heads, d.mla, width)
        self.post_attention_layernorm = LlamaNorm(d.hidden, d.rms_eps)
        self.mlp = SwigluMlp(d.hidden, d.inner, bias=d.mlp_bias)


class MidLayer(DraftLayer):
    """The first layer: its attention reads the concatenated embedding and hidden state."""

    def __init__(self, d: Eagle3Geometry) -> None:
        both = d.input_width == "embedding_and_hidden"
        super().__init__(d, 2 * d.hidden if both else d.hidden)
        if both:
            self.input_layernorm = LlamaNorm(d.hidden, d.rms_eps)
        self.hidden_norm = LlamaNorm(d.hidden, d.rms_eps)


class DeepLayer(DraftLayer):
    """A layer after the first, as in LLaMA."""

    def __init__(self, d: Eagle3Geometry) -> None:
        super().__init__(d, d.hidden)
        self.input_layernorm = LlamaNorm(d.hidden, d.rms_eps)


class DraftWeights(nn.Module):
    """All tensors of a draft checkpoint; engines store them with the prefix ``draft.``."""

    def __init__(self, d: Eagle3Geometry, target: TargetGeometry) -> None:
        super().__init__()
        self.fc = nn.Linear(len(d.aux_layers) * target.hidden, d.hidden, bias=False)
        if d.norm_before_fc:
            self.input_norm = LlamaNorm(len(d.aux_layers) * target.hidden, d.rms_eps)
        if d.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaNorm(target.hidden, d.rms_eps) for _ in d.aux_layers)
        self.midlayer = MidLayer(d)
        if d.layers > 1:
            self.layers = nn.ModuleDict({str(i): DeepLayer(d) for i in range(1, d.layers)})
        self.norm = LlamaNorm(d.hidden, d.rms_eps)
        if d.own_head:
            self.lm_head = nn.Linear(d.hidden, d.vocab, bias=False)
        if d.own_embedding:
            self.embed_tokens = nn.Embedding(target.vocab, d.hidden)


class DraftFuse(nn.Module):
    """The role ``draft_fuse``: the target's aux hidden states to the draft's hidden state."""

    def __init__(self, d: Eagle3Geometry, target: TargetGeometry) -> None:
        super().__init__()
        self.geometry = d
        self.draft = DraftWeights(d, target)

    def forward(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        """``aux_hidden`` [T, aux_layers·Ht] → hidden [T, H]."""
        if self.geometry.norm_before_fc:
            aux_hidden = self.draft.input_norm(aux_hidden)
        if self.geometry.fc_norm:
            aux_hidden = self._norm_states(aux_hidden)
        return self.draft.fc(aux_hidden)

    def _norm_states(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        """Norm each of the concatenated states [T, aux_layers·Ht] separately."""
        norms: Any = self.draft.fc_norm
        if len(norms) == 1:
            normed: torch.Tensor = norms[0](aux_hidden)
            return normed
        states = aux_hidden.view(-1, len(norms), self.draft.fc.in_features // len(norms))
        return torch.cat([norm(states.select(1, i)) for i, norm in enumerate(norms)], dim=-1)


class TargetEmbedding(nn.Module):
    """The target's embedding with the target's name, for a draft that shares it."""

    def __init__(self, target: TargetGeometry) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(target.vocab, target.hidden)


class Eagle3(nn.Module):
    """The role ``draft``: one level of drafting, or the extension over accepted tokens."""

    def __init__(self, d: Eagle3Geometry, target: TargetGeometry, max_positions: int) -> None:
        super().__init__()
        self.geometry = d
        self.draft = DraftWeights(d, target)
        if not d.own_embedding:
            self.model = TargetEmbedding(target)
        if not d.own_head:
            self.lm_head = nn.Linear(target.hidden, target.vocab, bias=False)
        table = torch.empty(max_positions, d.rotated // 2)
        self.register_buffer("draft_rope_cos", table)
        self.register_buffer("draft_rope_sin", table.clone())

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        launch: Launch,
        view: GroupView,
        pools: tuple[LayerPools | LatentPool, ...],
    ) -> tuple[Any, ...]:
        """Row t pairs ``hidden`` [T, H] with the next token's embedding, at the hidden's position.

        Returns draft_logits [R, Vd] fp32, hidden_out [T, H] (the recurrence), the written pools,
        the last layer's stages attention and ffn, and pre_head.
        """
        d, mid = self.geometry, self.draft.midlayer
        embed = self.draft.embed_tokens if d.own_embedding else self.model.embed_tokens
        head = self.draft.lm_head if d.own_head else self.lm_head
        normed = mid.hidden_norm(hidden)
        u = normed
        if d.input_width == "embedding_and_hidden":
            u = torch.cat([mid.input_layernorm(embed(token_ids)), normed], dim=-1)
        context = view, launch, (self.draft_rope_cos, self.draft_rope_sin)
        stream = normed if d.norm_before_residual else hidden
        out, *stages, first = _run_layer(mid, stream, u, pools[0], context)
        written = [first]
        for pool, layer in zip(pools[1:], self._further_layers(), strict=True):
            out, *stages, pair = _run_layer(layer, out, layer.input_layernorm(out), pool, context)
            written.append(pair)
        normed_out = self.draft.norm(out)
        pre_head = normed_out.index_select(0, launch.logit_rows)
        logits = head(pre_head).float()
        recurrence = normed_out if d.norm_output else out
        return logits, recurrence, tuple(written), *stages, pre_head

    def _further_layers(self) -> Iterable[Any]:
        return self.draft.layers.values() if self.geometry.layers > 1 else ()


def _run_layer(
    layer: Any, stream: torch.Tensor, u: torch.Tensor, pools: Any, context: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """Return the residual ``stream`` [T, H] after a layer whose attention reads ``u``, the stages
    attention and ffn, and the written pools.
    """
    attention, written, *_ = layer.self_attn(u, pools, *context)
    stream = stream + attention
    ffn = layer.mlp(layer.post_attention_layernorm(stream))
    return stream + ffn, attention, ffn, written
