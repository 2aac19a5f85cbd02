"""The EAGLE3 draft for training (arXiv 2503.01840): test-time training on full sequences.

Row t of a sequence combines the target's hidden states h_t and the next token x_{t+1}. Step i of
test-time training imitates the i-th draft token after row t:

    input      step 0: fc(h_t); later steps: the previous step's output at the same row
    token      x_{t+1+i}
    position   t + i
    attention  one softmax over keys of step 0 at rows s ≤ t, and of steps 1 … i at row t
    predicts   the target's distribution after x_{t+1+i}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Keys:
    """Rotated keys and values [B, Hkv, R, D] of one step."""

    k: torch.Tensor
    v: torch.Tensor


class _Attention(nn.Module):
    """Attention of one step to step 0's rows and to later keys of the same row."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden, q, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden, bias=False)

    def forward(self, u: torch.Tensor, positions: torch.Tensor, past: list[_Keys]) -> torch.Tensor:
        """Map ``u`` [B, R, 2H] at ``positions`` [R] to [B, R, H]; append the keys to ``past``."""
        q = self._rotate(self.q_proj(u), positions)
        past.append(_Keys(self._rotate(self.k_proj(u), positions), self._heads(self.v_proj(u))))
        return self.o_proj(self._attend(q, past).transpose(1, 2).flatten(2))

    def _attend(self, q: torch.Tensor, past: list[_Keys]) -> torch.Tensor:
        batch, heads, rows, width = q.shape
        grouped = q.unflatten(1, (self.shape.kv_heads, -1))  # [B, Hkv, G, R, D]
        first, later = past[0], past[1:]
        causal = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril()
        logits = (grouped @ first.k.unsqueeze(2).mT).float().masked_fill(~causal, -torch.inf)
        row_logits = [
            (grouped * step.k.unsqueeze(2)).sum(-1, keepdim=True).float() for step in later
        ]
        logits = torch.cat([logits, *row_logits], dim=-1) * width**-0.5
        weights = logits.softmax(dim=-1).to(q.dtype)
        out = weights[..., :rows] @ first.v.unsqueeze(2)
        for index, step in enumerate(later):
            out = out + weights[..., rows + index, None] * step.v.unsqueeze(2)
        return out.reshape(batch, heads, rows, width)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return by_head(x, self.shape.head_dim)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate(self._heads(x), positions, self.shape.rope_theta)


class MidLayer(nn.Module):
    """The draft's only layer."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.rms_eps)
        self.hidden_norm = Norm(shape.hidden, shape.rms_eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.rms_eps)
        self.mlp = Mlp(shape)

    def forward(
        self, embedded: torch.Tensor, g: torch.Tensor, positions: torch.Tensor, past: list[_Keys]
    ) -> torch.Tensor:
        """Map ``embedded`` and ``g`` [B, R, H] to the layer's output [B, R, H]."""
        u = torch.cat([self.input_layernorm(embedded), self.hidden_norm(g)], dim=-1)
        y = g + self.self_attn(u, positions, past)
        return y + self.mlp(self.post_attention_layernorm(y))


class DraftModule(nn.Module):
    """An EAGLE3 draft; its parameters have the checkpoint's names."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.aux_layers) * shape.target_hidden, shape.hidden, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = Norm(shape.hidden, shape.rms_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the matrices."""
        initialise(self, self.fc, generator)

    def predict(
        self,
        aux_hidden: torch.Tensor,
        ids: torch.Tensor,
        token_weights: TokenWeights,
        count: int,
        random: torch.Generator | None = None,  # noqa: ARG002
    ) -> list[DraftLogits]:
        """Implement :class:`TrainableDraft`: predict at every row."""
        rows = torch.arange(aux_hidden.shape[1], device=ids.device)
        embedded = F.embedding(ids[:, 1:], token_weights.embedding)
        return [DraftLogits(rows, logits) for logits in self.steps(aux_hidden, embedded, count)]

    def steps(
        self, aux_hidden: torch.Tensor, embedded: torch.Tensor, count: int
    ) -> Iterator[torch.Tensor]:
        """Yield logits [B, R, Vd] of test-time training steps 0 … count − 1.

        ``aux_hidden`` [B, R, aux_layers·Ht] is that of rows t = 0 … R − 1. ``embedded``
        [B, R + count − 1, H] are the embeddings of x_1, x_2, …; step i reads them from i on.
        """
        rows = aux_hidden.shape[1]
        g = self.fc(aux_hidden)
        past: list[_Keys] = []
        positions = torch.arange(rows, device=aux_hidden.device)
        for step in range(count):
            g = self.midlayer(embedded[:, step : step + rows], g, positions + step, past)
            yield self.lm_head(self.norm(g))
