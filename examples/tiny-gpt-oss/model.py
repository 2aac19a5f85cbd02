"""GPT-OSS for training: transformers' function, with all experts as one dense product."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from geometry import Geometry
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from specbuild.builder.checkpoint.mxfp4 import fake_quantise

SWISH_ALPHA = 1.702
_QUERIES = 256


@dataclass(frozen=True, kw_only=True)
class Positions:
    """What depends on the sequence length T alone.

    On a GPU the masks are flex attention's block masks, elsewhere dense bool [T, T].
    """

    cos: Tensor  # float32 [T, D/2], times YaRN's attention factor
    sin: Tensor
    sliding: BlockMask | Tensor
    full: BlockMask | Tensor


def inverse_frequencies(geometry: Geometry) -> tuple[Tensor, float]:
    """Return YaRN's float32 inverse frequencies [D/2] and attention factor, bounds not rounded."""
    half = geometry.head_dim // 2
    exponent = torch.arange(half, dtype=torch.float64) / half
    frequency = geometry.rope_theta**exponent

    def dimension(rotations: float) -> float:
        wavelengths = geometry.original_context / (rotations * 2 * math.pi)
        return half * math.log(wavelengths) / math.log(geometry.rope_theta)

    low, high = dimension(geometry.beta_fast), dimension(geometry.beta_slow)
    keep = 1 - ((torch.arange(half) - low) / (high - low)).clamp(0, 1)
    inverse = keep / frequency + (1 - keep) / (geometry.yarn_factor * frequency)
    return inverse.float(), 0.1 * math.log(geometry.yarn_factor) + 1


def make_positions(geometry: Geometry, length: int, device: torch.device) -> Positions:
    """Return the rotary tables and masks of sequences of `length` tokens."""
    inverse, factor = inverse_frequencies(geometry)
    angles = torch.arange(length).float()[:, None] * inverse
    masks = [_mask(length, window, device) for window in (geometry.window, length)]
    return Positions(
        cos=(angles.cos() * factor).to(device),
        sin=(angles.sin() * factor).to(device),
        sliding=masks[0],
        full=masks[1],
    )


def _mask(length: int, window: int, device: torch.device) -> BlockMask | Tensor:
    # The window is a tensor so that sliding and full layers share one compiled graph.
    window_tensor = torch.tensor(window, device=device)

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window_tensor)

    if device.type == "cuda":
        return create_block_mask(visible, None, None, length, length, device=device)
    index = torch.arange(length, device=device)
    return visible(index, index, index[:, None], index[None, :])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise x [..., H] in float32, multiply by the float32 weight [H], then cast back."""
    wide = x.float()
    return (weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, heads, T, D] by halves with cos, sin [T, D/2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: BlockMask | Tensor) -> Tensor:
    """Return attention of q [B, Hq, T, D] over k, v [B, Hkv, T, D] with sink logits [Hq].

    A sink adds exp(s) to the softmax's denominator: it scales plain attention by sigmoid(lse - s).
    """
    scale = q.shape[-1] ** -0.5
    if isinstance(mask, BlockMask):
        out, lse = flex_attention(
            q, k, v, block_mask=mask, scale=scale, enable_gqa=True, return_lse=True
        )
    else:
        # A few queries at a time: the logits of thousands would fill the memory of a small machine.
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        parts = []
        for first in range(0, q.shape[2], _QUERIES):
            seen = min(first + _QUERIES, q.shape[2])
            logits = (q[:, :, first:seen] @ k[:, :, :seen].mT).float() * scale
            logits = logits.masked_fill(~mask[first:seen, :seen], -math.inf)
            lse = logits.logsumexp(-1)
            weights = (logits - lse[..., None]).exp().to(v.dtype)
            parts.append((weights @ v[:, :, :seen], lse))
        out, lse = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    return out * torch.sigmoid(lse - sinks[:, None])[..., None].to(out.dtype)


class Block(nn.Module):
    """One decoder layer's parameters, expert weights as [experts, out, in]."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        g = self.geometry = geometry
        query, kv = g.query_heads * g.head_dim, g.kv_heads * g.head_dim
        self.input_norm = nn.Parameter(torch.ones(g.hidden))
        self.q = nn.Parameter(torch.randn(query, g.hidden) * g.hidden**-0.5)
        self.k = nn.Parameter(torch.randn(kv, g.hidden) * g.hidden**-0.5)
        self.v = nn.Parameter(torch.randn(kv, g.hidden) * g.hidden**-0.5)
        self.o = nn.Parameter(torch.zeros(g.hidden, query))
        self.q_bias = nn.Parameter(torch.zeros(query))
        self.k_bias = nn.Parameter(torch.zeros(kv))
        self.v_bias = nn.Parameter(torch.zeros(kv))
        self.o_bias = nn.Parameter(torch.zeros(g.hidden))
        self.sinks = nn.Parameter(torch.randn(g.query_heads))
        self.post_norm = nn.Parameter(torch.ones(g.hidden))
        self.router = nn.Parameter(torch.randn(g.experts, g.hidden) * 0.3 * g.hidden**-0.5)
        self.router_bias = nn.Parameter(torch.zeros(g.experts))
        self.gate_up = nn.Parameter(
            torch.randn(g.experts, 2 * g.intermediate, g.hidden) * g.hidden**-0.5
        )
        self.gate_up_bias = nn.Parameter(torch.zeros(g.experts, 2 * g.intermediate))
        self.down = nn.Parameter(torch.zeros(g.experts, g.hidden, g.intermediate))
        self.down_bias = nn.Parameter(torch.zeros(g.experts, g.hidden))

    def attention(self, x: Tensor, positions: Positions, mask: BlockMask | Tensor) -> Tensor:
        """Return the attention branch [B, T, H] of the normalised x [B, T, H]."""
        g = self.geometry
        weight = torch.cat((self.q, self.k, self.v)).to(x.dtype)
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias)).to(x.dtype)
        heads = F.linear(x, weight, bias).unflatten(-1, (-1, g.head_dim)).transpose(1, 2)
        q, k, v = heads.split((g.query_heads, g.kv_heads, g.kv_heads), dim=1)
        q, k = rotate(q, positions.cos, positions.sin), rotate(k, positions.cos, positions.sin)
        out = attend(q, k, v.contiguous(), self.sinks, mask).transpose(1, 2).flatten(-2)
        return F.linear(out, self.o.to(x.dtype), self.o_bias.to(x.dtype))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return all experts' weights [B, T, E] (0 where not chosen) and the balance loss."""
        g = self.geometry
        logits = F.linear(x, self.router.to(x.dtype), self.router_bias.to(x.dtype)).float()
        # Rank by pairwise comparison, ties to the lower index: fuses, which a top-k does not.
        index = torch.arange(g.experts, device=x.device)
        mine, other = logits[..., :, None], logits[..., None, :]
        ahead = (other > mine) | ((other == mine) & (index[None, :] < index[:, None]))
        chosen = ahead.sum(-1) < g.experts_per_token
        weights = logits.masked_fill(~chosen, -math.inf).softmax(-1)
        load = chosen.float().mean((0, 1)) / g.experts_per_token
        balance = g.experts * (load * logits.softmax(-1).mean((0, 1))).sum()
        return weights, balance

    def experts(self, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Return sum_e weights_e * expert_e(x) [B, T, H], every expert computed for every token."""
        limit = self.geometry.swiglu_limit
        # Rows [gates of all experts; ups of all experts] instead of gate and up interleaved.
        rows = gate_up.unflatten(1, (-1, 2)).permute(2, 0, 1, 3).flatten(0, 2)
        bias = self.gate_up_bias.unflatten(1, (-1, 2)).permute(2, 0, 1).flatten()
        gate, up = F.linear(x, rows.to(x.dtype), bias.to(x.dtype)).chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        inner = gate * torch.sigmoid(SWISH_ALPHA * gate) * (up + 1)
        inner = inner.unflatten(-1, (self.geometry.experts, -1)) * weights[..., None].to(x.dtype)
        columns = down.permute(1, 0, 2).flatten(1).to(x.dtype)  # [H, E*I]
        return F.linear(inner.flatten(-2), columns) + weights.to(x.dtype) @ self.down_bias.to(
            x.dtype
        )


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The expert weights one forward pass uses: as stored, or rounded to MXFP4."""

    gate_up: Tensor  # float32 [E, 2I, H]
    down: Tensor  # float32 [E, H, I]


def run_block(
    block: Block,
    x: Tensor,
    experts: ExpertWeights,
    positions: Positions,
    mask: BlockMask | Tensor,
    *,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return the layer's output [B, T, H] and its router's balance loss."""
    eps = block.geometry.rms_eps
    x = x + F.dropout(block.attention(rms_norm(x, block.input_norm, eps), positions, mask), dropout)
    normal = rms_norm(x, block.post_norm, eps)
    weights, balance = block.route(normal)
    x = x + F.dropout(block.experts(normal, weights, experts.gate_up, experts.down), dropout)
    return x, balance


def straight_through(weight: Tensor) -> Tensor:
    """Round to MXFP4 going forward, pass the gradient unchanged going back."""
    return fake_quantise(weight.detach()) + (weight - weight.detach())


def token_losses(x: Tensor, norm: Tensor, head: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Return the cross-entropy float32 [B*T] of final states x [B, T, H] against labels [B, T]."""
    logits = F.linear(rms_norm(x, norm, eps), head.to(x.dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


class Target(nn.Module):
    """The whole model. `compiled()` swaps in compiled pieces; the mathematics does not change."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.embedding = nn.Parameter(torch.randn(geometry.vocabulary, geometry.hidden))
        self.blocks = nn.ModuleList(Block(geometry) for _ in range(geometry.layers))
        self.norm = nn.Parameter(torch.ones(geometry.hidden))
        self.head = nn.Parameter(torch.randn(geometry.vocabulary, geometry.hidden) * 0.005)
        self.run_block, self.token_losses, self.straight_through = (
            run_block,
            token_losses,
            straight_through,
        )

    def compiled(self) -> Target:
        """Compile the layer, the loss and the rounding, each once for all layers."""
        self.run_block = torch.compile(run_block, dynamic=False)
        self.token_losses = torch.compile(token_losses, dynamic=False)
        self.straight_through = torch.compile(straight_through, dynamic=False)
        return self

    def states(
        self,
        ids: Tensor,
        positions: Positions,
        *,
        dtype: torch.dtype,
        quantised: bool,
        dropout: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return the last layer's output [B, T, H] for ids [B, T], and the mean balance loss."""
        x = F.dropout(F.embedding(ids, self.embedding).to(dtype), dropout)
        balances = []
        for layer, block in enumerate(self.blocks):
            prepare = self.straight_through if quantised else nn.Identity()
            experts = ExpertWeights(gate_up=prepare(block.gate_up), down=prepare(block.down))
            mask = positions.sliding if self.geometry.is_sliding(layer) else positions.full
            x, balance = self.run_block(block, x, experts, positions, mask, dropout=dropout)
            balances.append(balance)
        return x, torch.stack(balances).mean()

    def losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of each position, float32 [B*T]."""
        return self.token_losses(x, self.norm, self.head, labels, self.geometry.rms_eps)
