"""Layers and interfaces of drafts for training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional as F

INITIAL_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """The sizes of a draft that reads ``aux_layers`` hidden states of ``target_hidden`` values."""

    hidden: int
    target_hidden: int
    aux_layers: tuple[int, ...]
    vocab: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    layers: int = 1


class TokenWeights(NamedTuple):
    """The target's embedding and head, [V, H]."""

    embedding: torch.Tensor
    head: torch.Tensor


class DraftLogits(NamedTuple):
    """A draft's predictions for one position: ``logits`` [B, n, Vd] for the rows ``rows`` [n]."""

    rows: torch.Tensor
    logits: torch.Tensor


class TrainableDraft(Protocol):
    """A draft in training. Row t combines the hidden state h_t and the token x_{t+1}."""

    @property
    def shape(self) -> DraftShape:
        """Return the sizes."""
        ...

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the parameters."""
        ...

    def predict(
        self,
        aux_hidden: torch.Tensor,
        ids: torch.Tensor,
        token_weights: TokenWeights,
        count: int,
        random: torch.Generator | None = None,
    ) -> list[DraftLogits]:
        """Predict positions 1 … ``count`` after x_{t+1}, at rows t = 0 … R − 1.

        ``aux_hidden`` is [B, R, aux_layers·Ht], ``ids`` [B, R + count]. With ``random`` a draft
        may predict a random part of the rows, otherwise it predicts all.
        """
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors by name."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Load the tensors of :meth:`state_dict`."""
        ...

    def to(self, device: str) -> object:
        """Move the draft to a device."""
        ...


class Norm(nn.Module):
    """RMSNorm in fp32, which casts back before it multiplies by the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x`` [..., H] to [..., H]."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class Mlp(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x`` [..., H] to [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def initialise(draft: nn.Module, fc: nn.Linear, generator: torch.Generator) -> None:
    """Draw matrices from N(0, 0.02²), and ``fc`` such that it preserves the states' rms."""
    for parameter in draft.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=INITIAL_STD, generator=generator)
    nn.init.normal_(fc.weight, std=fc.in_features**-0.5, generator=generator)


def by_head(x: torch.Tensor, width: int) -> torch.Tensor:
    """Map [..., R, heads·D] to [..., heads, R, D]."""
    return x.unflatten(-1, (-1, width)).transpose(-2, -3)


def rotate(heads: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Apply half-split RoPE to ``heads`` [..., R, D] at ``positions`` [R]."""
    half = heads.shape[-1] // 2
    exponent = torch.arange(half, device=heads.device, dtype=torch.float32) / half
    angle = positions[:, None].float() * theta**-exponent
    cos, sin = angle.cos(), angle.sin()
    low, high = heads.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(heads.dtype)
