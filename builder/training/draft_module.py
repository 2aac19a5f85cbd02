"""The EAGLE3 draft for training (arXiv 2503.01840): test-time training over whole sequences.

Row t of a sequence pairs the target's aux hidden state h_t with the next token x_{t+1}. Step i of
test-time training imitates the i-th drafted token after row t:

    input      step 0: fc(h_t); later: the previous step's output at the same row
    token      x_{t+1+i}
    position   t + i
    attention  keys of step 0 at rows s ≤ t, and of steps 1 … i at row t alone, in one softmax
    predicts   the target's distribution after x_{t+1+i}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Keys:
    """Rotated keys and values [B, Hkv, R, D] of one step."""

    k: torch.Tensor
    v: torch.Tensor


class _Attention(nn.Module):
    """Attention of one step over step 0's rows and the row's own later keys."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden, q, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden, bias=False)

    def forward(self, u: torch.Tensor, positions: torch.Tensor, past: list[_Keys]) -> torch.Tensor:
        """``u`` [B, R, 2H] at ``positions`` [R] → [B, R, H]; this step's keys join ``past``."""
        q = self._rotated(self.q_proj(u), positions)
        past.append(_Keys(self._rotated(self.k_proj(u), positions), self._heads(self.v_proj(u))))
        return self.o_proj(self._attend(q, past).transpose(1, 2).flatten(2))

    def _attend(self, q: torch.Tensor, past: list[_Keys]) -> torch.Tensor:
        batch, heads, rows, width = q.shape
        grouped = q.unflatten(1, (self.shape.kv_heads, -1))  # [B, Hkv, G, R, D]
        first, later = past[0], past[1:]
        causal = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril()
        logits = (grouped @ first.k.unsqueeze(2).mT).float().masked_fill(~causal, -torch.inf)
        own = [(grouped * step.k.unsqueeze(2)).sum(-1, keepdim=True).float() for step in later]
        logits = torch.cat([logits, *own], dim=-1) * width**-0.5
        weights = logits.softmax(dim=-1).to(q.dtype)
        out = weights[..., :rows] @ first.v.unsqueeze(2)
        for index, step in enumerate(later):
            out = out + weights[..., rows + index, None] * step.v.unsqueeze(2)
        return out.reshape(batch, heads, rows, width)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return by_head(x, self.shape.head_dim)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotated(self._heads(x), positions, self.shape.rope_theta)


class MidLayer(nn.Module):
    """The draft's one block."""

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
        """``embedded`` and ``g`` [B, R, H] → the block's output [B, R, H]."""
        u = torch.cat([self.input_layernorm(embedded), self.hidden_norm(g)], dim=-1)
        y = g + self.self_attn(u, positions, past)
        return y + self.mlp(self.post_attention_layernorm(y))


class DraftModule(nn.Module):
    """An EAGLE3 draft; its parameters bear the names of the checkpoint."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.aux_layers) * shape.target_hidden, shape.hidden, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = Norm(shape.hidden, shape.rms_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Draws its matrices."""
        initialise(self, self.fc, generator)

    def drafted(
        self,
        aux_hidden: torch.Tensor,
        ids: torch.Tensor,
        words: Words,
        count: int,
        random: torch.Generator | None = None,  # noqa: ARG002
    ) -> list[Drafted]:
        """Every row of every step."""
        rows = torch.arange(aux_hidden.shape[1], device=ids.device)
        embedded = F.embedding(ids[:, 1:], words.embedding)
        return [Drafted(rows, logits) for logits in self.steps(aux_hidden, embedded, count)]

    def steps(
        self, aux_hidden: torch.Tensor, embedded: torch.Tensor, count: int
    ) -> Iterator[torch.Tensor]:
        """Logits [B, R, Vd] of test-time training steps 0 … count − 1.

        ``aux_hidden`` [B, R, aux_layers·Ht] of rows t = 0 … R − 1; ``embedded`` [B, R + count − 1,
        H] are the embeddings of x_1, x_2, …: step i reads those from i on.
        """
        rows = aux_hidden.shape[1]
        g = self.fc(aux_hidden)
        past: list[_Keys] = []
        positions = torch.arange(rows, device=aux_hidden.device)
        for step in range(count):
            g = self.midlayer(embedded[:, step : step + rows], g, positions + step, past)
            yield self.lm_head(self.norm(g))
