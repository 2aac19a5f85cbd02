"""What the drafts that are trained here are made of."""

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
    """Sizes of a draft that reads ``aux_layers`` states of the target, each ``target_hidden``
    wide."""

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


class Words(NamedTuple):
    """The target's embedding and head, [V, H]."""

    embedding: torch.Tensor
    head: torch.Tensor


class Drafted(NamedTuple):
    """What a draft says of one position ahead: ``logits`` [B, n, Vd] of the rows ``rows`` [n]."""

    rows: torch.Tensor
    logits: torch.Tensor


class TrainedDraft(Protocol):
    """A draft that is trained. Row t pairs the state h_t with the token x_{t+1}."""

    @property
    def shape(self) -> DraftShape:
        """Its sizes."""
        ...

    def initialise(self, generator: torch.Generator) -> None:
        """Draws its parameters."""
        ...

    def drafted(
        self,
        aux_hidden: torch.Tensor,
        ids: torch.Tensor,
        words: Words,
        count: int,
        random: torch.Generator | None = None,
    ) -> list[Drafted]:
        """What it says of positions 1 … ``count`` behind x_{t+1}, at rows t = 0 … R − 1.

        ``aux_hidden`` [B, R, aux_layers·Ht], ``ids`` [B, R + count]. With ``random`` it may take a
        part of the rows, else it takes all.
        """
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its parameters."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Its tensors by name."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Takes the tensors of :meth:`state_dict`."""
        ...

    def to(self, device: str) -> object:
        """Moves it."""
        ...


class Norm(nn.Module):
    """RMSNorm in fp32 that casts back before the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., H] → [..., H]."""
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
        """``x`` [..., H] → [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def initialise(draft: nn.Module, fc: nn.Linear, generator: torch.Generator) -> None:
    """Draws matrices from N(0, 0.02²), the fusing one so that it keeps the states' size."""
    for parameter in draft.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=INITIAL_STD, generator=generator)
    nn.init.normal_(fc.weight, std=fc.in_features**-0.5, generator=generator)


def by_head(x: torch.Tensor, width: int) -> torch.Tensor:
    """[..., R, heads·D] → [..., heads, R, D]."""
    return x.unflatten(-1, (-1, width)).transpose(-2, -3)


def rotated(heads: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Half-split RoPE of ``heads`` [..., R, D] at ``positions`` [R]."""
    half = heads.shape[-1] // 2
    exponent = torch.arange(half, device=heads.device, dtype=torch.float32) / half
    angle = positions[:, None].float() * theta**-exponent
    cos, sin = angle.cos(), angle.sin()
    low, high = heads.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(heads.dtype)
