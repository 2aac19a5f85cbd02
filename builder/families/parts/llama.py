"""Norm and feed-forward of LLaMA, shared by other families and EAGLE3 drafts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from specbuild.runtime.engine_dir.geometry import Norm


class LlamaNorm(nn.Module):
    """RMSNorm that casts to the input's type before the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., H] → [..., H]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RmsNorm(nn.Module):
    """RMSNorm in fp32, multiplied by the weight in fp32 before the cast back."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, H] → [T, H]."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def norm_module(norm: Norm, width: int) -> nn.Module:
    """Return the norm of this geometry over ``width`` values."""
    kind = LlamaNorm if norm.rounding == "before_weight" else RmsNorm
    return kind(width, norm.eps)


class SwigluMlp(nn.Module):
    """SwiGLU feed-forward, ``W_down (silu(W_gate x) · W_up x)``, optionally with GELU."""

    def __init__(
        self, hidden: int, inner: int, *, bias: bool = False, activation: str = "swiglu"
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, H] → [T, H]."""
        gate = self.gate_proj(x)
        if self.activation == "geglu_tanh":
            return self.down_proj(F.gelu(gate, approximate="tanh") * self.up_proj(x))
        return self.down_proj(F.silu(gate) * self.up_proj(x))
