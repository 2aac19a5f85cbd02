"""DFlash and JetSpec drafts for training (arXiv 2602.06036, 2606.18394): blocks at many anchors.

At row t the context is the hidden states h_0 … h_t, and a block follows it:

    rows       the token x_{t+1}, then mask tokens, at positions t + 1, t + 2, …
    attention  keys of the states s ≤ t, and of the block: all rows, or with JetSpec earlier rows
    predicts   row i predicts the target's distribution after x_{t+i}
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from specbuild.builder.training.draft_layers import (
    DraftLogits,
    DraftShape,
    Mlp,
    Norm,
    TokenWeights,
    by_head,
    initialise,
    rotate,
)


class _Attention(nn.Module):
    """Attention of a block's queries to the keys of the context and of the block."""

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
        """Map blocks ``x`` [B, A, b, H], which follow ``anchors`` [A] of ``context`` [B, R, H]."""
        width, theta, block = self.shape.head_dim, self.shape.rope_theta, x.shape[2]
        context_positions = torch.arange(context.shape[1], device=x.device)
        positions = (anchors[:, None] + 1 + torch.arange(block, device=x.device)).flatten()
        flat_x = x.flatten(1, 2)

        def keys(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return rotate(self.k_norm(by_head(self.k_proj(rows), width)), positions, theta)

        q = rotate(self.q_norm(by_head(self.q_proj(flat_x), width)), positions, theta)
        q = q.unflatten(1, (self.shape.kv_heads, -1))  # [B, Hkv, G, A·b, D]
        k, v = (
            keys(context, context_positions).unsqueeze(2),
            by_head(self.v_proj(context), width).unsqueeze(2),
        )
        block_k = (
            keys(flat_x, positions).unflatten(2, (-1, block)).unsqueeze(2)
        )  # [B, Hkv, 1, A, b, D]
        block_v = by_head(self.v_proj(flat_x), width).unflatten(2, (-1, block)).unsqueeze(2)
        is_later = (context_positions > anchors[:, None]).repeat_interleave(block, dim=0)
        context_logits = (q @ k.mT).float().masked_fill(is_later, -torch.inf)
        block_logits = (q.unflatten(3, (-1, block)) @ block_k.mT).float()  # [B, Hkv, G, A, b, b]
        if self.causal:
            is_ahead = torch.ones(block, block, dtype=torch.bool, device=x.device).triu(1)
            block_logits = block_logits.masked_fill(is_ahead, -torch.inf)
        logits = torch.cat([context_logits, block_logits.flatten(3, 4)], dim=-1) * width**-0.5
        weights = logits.softmax(dim=-1).to(q.dtype)
        count = context.shape[1]
        from_block = weights[..., count:].unflatten(3, (-1, block)) @ block_v
        attended = weights[..., :count] @ v + from_block.flatten(3, 4)
        return self.o_proj(attended.flatten(1, 2).transpose(1, 2).flatten(2)).view_as(x)


class _Layer(nn.Module):
    """A layer with Qwen3's architecture."""

    def __init__(self, shape: DraftShape, *, causal: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.rms_eps)
        self.self_attn = _Attention(shape, causal=causal)
        self.post_attention_layernorm = Norm(shape.hidden, shape.rms_eps)
        self.mlp = Mlp(shape)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """Return the layer's output for blocks ``x`` [B, A, b, H]."""
        x = x + self.self_attn(self.input_layernorm(x), context, anchors)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashModule(nn.Module):
    """A draft of blocks; its parameters have the checkpoint's names."""

    def __init__(self, shape: DraftShape, *, mask_token: int, causal: bool, anchors: int) -> None:
        super().__init__()
        self.shape, self.mask_token, self.causal = shape, mask_token, causal
        self.anchors = anchors
        input_width = len(shape.aux_layers) * shape.target_hidden
        self.fc = nn.Linear(input_width, shape.hidden, bias=False)
        self.hidden_norm = Norm(shape.hidden, shape.rms_eps)
        self.layers = nn.ModuleList(_Layer(shape, causal=causal) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.rms_eps)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the matrices."""
        initialise(self, self.fc, generator)

    def predict(
        self,
        aux_hidden: torch.Tensor,
        ids: torch.Tensor,
        token_weights: TokenWeights,
        count: int,
        random: torch.Generator | None = None,
    ) -> list[DraftLogits]:
        """Implement :class:`TrainableDraft`; with ``random`` it predicts at ``anchors`` rows."""
        rows = aux_hidden.shape[1]
        anchor_rows = torch.arange(rows, device=ids.device)
        if random is not None and self.anchors < rows:
            anchor_rows = (
                torch.randperm(rows, generator=random)[: self.anchors].sort().values.to(ids.device)
            )
        context = self.hidden_norm(self.fc(aux_hidden))
        masks = torch.full((len(ids), len(anchor_rows), count), self.mask_token, device=ids.device)
        blocks = torch.cat([ids[:, anchor_rows + 1, None], masks], dim=-1)
        x = F.embedding(blocks, token_weights.embedding).to(context.dtype)
        for layer in self.layers:
            x = layer(x, context, anchor_rows)
        logits = F.linear(self.norm(x[:, :, 1:]), token_weights.head.to(x.dtype))
        return [DraftLogits(anchor_rows, logits[:, :, step]) for step in range(count)]
