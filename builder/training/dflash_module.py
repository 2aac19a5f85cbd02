"""DFlash and JetSpec drafts for training (arXiv 2602.06036, 2606.18394): blocks at many anchors.

At row t the context is the states h_0 … h_t, and a block stands behind it:

    rows       the token x_{t+1}, then mask tokens, at positions t + 1, t + 2, …
    attention  keys of the states s ≤ t, and of the block: all of it, or what stands before a row
    predicts   row i the target's distribution after x_{t+i}
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from specbuild.builder.training.draft_layers import (
    Drafted,
    DraftShape,
    Mlp,
    Norm,
    Words,
    by_head,
    initialise,
    rotated,
)


class _Attention(nn.Module):
    """Queries of blocks over the context's keys and the block's own."""

    def __init__(self, shape: DraftShape, *, causal: bool) -> None:
        super().__init__()
        self.shape, self.causal = shape, causal
        q, kv = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, q, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.rms_eps)
        self.k_norm = Norm(shape.head_dim, shape.rms_eps)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """Blocks ``x`` [B, A, b, H] at ``anchors`` [A] over ``context`` [B, R, H] → as ``x``."""
        width, theta, block = self.shape.head_dim, self.shape.rope_theta, x.shape[2]
        places = torch.arange(context.shape[1], device=x.device)
        at = (anchors[:, None] + 1 + torch.arange(block, device=x.device)).flatten()
        flat = x.flatten(1, 2)

        def keys(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return rotated(self.k_norm(by_head(self.k_proj(rows), width)), positions, theta)

        q = rotated(self.q_norm(by_head(self.q_proj(flat), width)), at, theta)
        q = q.unflatten(1, (self.shape.kv_heads, -1))  # [B, Hkv, G, A·b, D]
        k, v = keys(context, places).unsqueeze(2), by_head(self.v_proj(context), width).unsqueeze(2)
        own_k = keys(flat, at).unflatten(2, (-1, block)).unsqueeze(2)  # [B, Hkv, 1, A, b, D]
        own_v = by_head(self.v_proj(flat), width).unflatten(2, (-1, block)).unsqueeze(2)
        later = (places > anchors[:, None]).repeat_interleave(block, dim=0)
        seen = (q @ k.mT).float().masked_fill(later, -torch.inf)
        own = (q.unflatten(3, (-1, block)) @ own_k.mT).float()  # [B, Hkv, G, A, b, b]
        if self.causal:
            ahead = torch.ones(block, block, dtype=torch.bool, device=x.device).triu(1)
            own = own.masked_fill(ahead, -torch.inf)
        logits = torch.cat([seen, own.flatten(3, 4)], dim=-1) * width**-0.5
        weights = logits.softmax(dim=-1).to(q.dtype)
        count = context.shape[1]
        inside = weights[..., count:].unflatten(3, (-1, block)) @ own_v
        attended = weights[..., :count] @ v + inside.flatten(3, 4)
        return self.o_proj(attended.flatten(1, 2).transpose(1, 2).flatten(2)).view_as(x)


class _Layer(nn.Module):
    """A block of Qwen3's form."""

    def __init__(self, shape: DraftShape, *, causal: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.rms_eps)
        self.self_attn = _Attention(shape, causal=causal)
        self.post_attention_layernorm = Norm(shape.hidden, shape.rms_eps)
        self.mlp = Mlp(shape)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """The blocks [B, A, b, H] after the layer."""
        x = x + self.self_attn(self.input_layernorm(x), context, anchors)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashModule(nn.Module):
    """A draft of blocks; its parameters bear the names of the checkpoint."""

    def __init__(self, shape: DraftShape, *, mask_token: int, causal: bool, anchors: int) -> None:
        super().__init__()
        self.shape, self.mask_token, self.causal = shape, mask_token, causal
        self.anchors = anchors
        read = len(shape.aux_layers) * shape.target_hidden
        self.fc = nn.Linear(read, shape.hidden, bias=False)
        self.hidden_norm = Norm(shape.hidden, shape.rms_eps)
        self.layers = nn.ModuleList(_Layer(shape, causal=causal) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.rms_eps)

    def initialise(self, generator: torch.Generator) -> None:
        """Draws its matrices."""
        initialise(self, self.fc, generator)

    def drafted(
        self,
        aux_hidden: torch.Tensor,
        ids: torch.Tensor,
        words: Words,
        count: int,
        random: torch.Generator | None = None,
    ) -> list[Drafted]:
        """As :class:`TrainedDraft` says; with ``random`` at so many anchors."""
        rows = aux_hidden.shape[1]
        at = torch.arange(rows, device=ids.device)
        if random is not None and self.anchors < rows:
            at = torch.randperm(rows, generator=random)[: self.anchors].sort().values.to(ids.device)
        context = self.hidden_norm(self.fc(aux_hidden))
        masks = torch.full((len(ids), len(at), count), self.mask_token, device=ids.device)
        blocks = torch.cat([ids[:, at + 1, None], masks], dim=-1)
        x = F.embedding(blocks, words.embedding).to(context.dtype)
        for layer in self.layers:
            x = layer(x, context, at)
        logits = F.linear(self.norm(x[:, :, 1:]), words.head.to(x.dtype))
        return [Drafted(at, logits[:, :, step]) for step in range(count)]
