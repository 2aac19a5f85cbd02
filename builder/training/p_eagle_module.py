"""The P-EAGLE draft for training (arXiv 2602.01469): every position in one pass.

Row t of depth 0 combines the hidden state h_t and x_{t+1}, as EAGLE3's first step does. Rows of
depth d ≥ 1 have the mask token and ``mask_hidden``:

    position   t + d
    attention  depth 0 at rows s ≤ t, and depths 1 … d at row t
    predicts   the target's distribution after x_{t+1+d}

Training drops rows at random: each depth has the share ``keep`` of the rows of the depth before
(conditional drop, section 4).
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
    """Attention of all depths; the input of a depth is [B or 1, n, width]."""

    def __init__(self, shape: DraftShape, width: int) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, q, bias=False)
        self.k_proj = nn.Linear(width, kv, bias=False)
        self.v_proj = nn.Linear(width, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden, bias=False)

    def forward(self, depths: list[torch.Tensor], rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """Map ``depths`` at their ``rows`` [n_d] to [B, n_d, H] each."""
        width, theta = self.shape.head_dim, self.shape.rope_theta
        positions = [at + depth for depth, at in enumerate(rows)]

        def project_and_rotate(
            projection: nn.Linear, u: torch.Tensor, at: torch.Tensor
        ) -> torch.Tensor:
            heads = by_head(projection(u), width)
            return rotate(heads.expand(-1, -1, len(at), -1), at, theta)

        keys = [
            project_and_rotate(self.k_proj, u, at) for u, at in zip(depths, positions, strict=True)
        ]
        values = [by_head(self.v_proj(u), width) for u in depths]
        out = []
        for depth, (u, at) in enumerate(zip(depths, positions, strict=True)):
            q = project_and_rotate(self.q_proj, u, at).unflatten(1, (self.shape.kv_heads, -1))
            row_pairs = []
            for earlier in range(1, depth + 1):
                index = torch.searchsorted(rows[earlier], rows[depth])
                v = values[earlier].expand(-1, -1, len(rows[earlier]), -1)
                row_pairs.append((keys[earlier][:, :, index], v[:, :, index]))
            attended = self._attend(q, (keys[0], values[0]), row_pairs, rows[depth])
            out.append(self.o_proj(attended.flatten(1, 2).transpose(1, 2).flatten(2)))
        return out

    def _attend(
        self,
        q: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        row_pairs: list[tuple[torch.Tensor, torch.Tensor]],
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Attend from ``q`` [B, Hkv, G, n, D] to depth 0 up to a row, and to the row's depths."""
        k, v = (part.unsqueeze(2) for part in context)
        is_later = torch.arange(k.shape[-2], device=q.device) > rows[:, None]
        logits = [(q @ k.mT).float().masked_fill(is_later, -torch.inf)]
        batch = logits[0].shape[0]
        for key, _ in row_pairs:
            row_logits = (q * key.unsqueeze(2)).sum(-1, keepdim=True).float()
            logits.append(row_logits.expand(batch, -1, -1, -1, -1))
        weights = (torch.cat(logits, dim=-1) * q.shape[-1] ** -0.5).softmax(dim=-1).to(q.dtype)
        count = k.shape[-2]
        out = weights[..., :count] @ v
        for index, (_, value) in enumerate(row_pairs):
            out = out + weights[..., count + index, None] * value.unsqueeze(2)
        return out


class _Layer(nn.Module):
    """A layer; the first one reads embeddings and hidden states."""

    def __init__(self, shape: DraftShape, *, first: bool) -> None:
        super().__init__()
        self.first = first
        self.input_layernorm = Norm(shape.hidden, shape.rms_eps)
        if first:
            self.hidden_norm = Norm(shape.hidden, shape.rms_eps)
        self.self_attn = _Attention(shape, (2 if first else 1) * shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden, shape.rms_eps)
        self.mlp = Mlp(shape)

    def forward(
        self, hidden: list[torch.Tensor], embedded: list[torch.Tensor], rows: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return each depth's hidden states after the layer."""
        if self.first:
            pairs = zip(embedded, hidden, strict=True)
            inputs = [
                torch.cat([self.input_layernorm(e), self.hidden_norm(g)], -1) for e, g in pairs
            ]
        else:
            inputs = [self.input_layernorm(g) for g in hidden]
        attended = self.self_attn(inputs, rows)
        residuals = [g + a for g, a in zip(hidden, attended, strict=True)]
        return [y + self.mlp(self.post_attention_layernorm(y)) for y in residuals]


class PEagleModule(nn.Module):
    """A P-EAGLE draft; its parameters have the checkpoint's names."""

    def __init__(self, shape: DraftShape, *, mask_token: int, keep: float) -> None:
        super().__init__()
        self.shape, self.mask_token, self.keep = shape, mask_token, keep
        input_width = len(shape.aux_layers) * shape.target_hidden
        self.fc = nn.Linear(input_width, shape.hidden, bias=False)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, input_width))
        self.midlayer = _Layer(shape, first=True)
        if shape.layers > 1:
            self.layers = nn.ModuleDict(
                {str(i): _Layer(shape, first=False) for i in range(1, shape.layers)}
            )
        self.norm = Norm(shape.hidden, shape.rms_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the matrices, and the mask's hidden states from N(0, 1)."""
        initialise(self, self.fc, generator)
        nn.init.normal_(self.mask_hidden, generator=generator)

    def predict(
        self,
        aux_hidden: torch.Tensor,
        ids: torch.Tensor,
        token_weights: TokenWeights,
        count: int,
        random: torch.Generator | None = None,
    ) -> list[DraftLogits]:
        """Implement :class:`TrainableDraft`; with ``random`` later depths drop rows."""
        rows = self._rows(aux_hidden.shape[1], count, random, ids.device)
        mask = torch.full((1, 1), self.mask_token, device=ids.device)
        embedded = [F.embedding(ids[:, 1 : 1 + aux_hidden.shape[1]], token_weights.embedding)]
        embedded += [F.embedding(mask, token_weights.embedding)] * (count - 1)
        hidden = [self.fc(aux_hidden), *[self.fc(self.mask_hidden)] * (count - 1)]
        layers = [self.midlayer, *(self.layers.values() if self.shape.layers > 1 else ())]
        for layer in layers:
            hidden = layer(hidden, embedded, rows)
        return [
            DraftLogits(at, self.lm_head(self.norm(x))) for at, x in zip(rows, hidden, strict=True)
        ]

    def _rows(
        self, rows: int, count: int, random: torch.Generator | None, device: torch.device
    ) -> list[torch.Tensor]:
        all_rows = torch.arange(rows, device=device)
        if random is None:
            return [all_rows] * count
        order = torch.randperm(rows, generator=random).to(device)
        counts = [max(1, round(rows * self.keep**depth)) for depth in range(count)]
        return [all_rows, *[order[:n].sort().values for n in counts[1:]]]
