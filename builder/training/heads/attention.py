"""Attention of full sequences with sinks, windows and selections, for transformers' GPT-OSS.

A sink is a key that every row sees, with a value of zero. Its score depends on the query head,
although heads share keys. Queries therefore get an additional column with their head's sink, which
only this key reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

ATTENTION = "specbuild_whole_sequences"
# Fused kernels require head widths that are multiples of this.
_ALIGNED = 8


@dataclass(frozen=True)
class AttentionInputs:
    """Attention's inputs: ``q`` [B, Hq, T, D], ``k`` and ``v`` [B, Hkv, S, D], rotated.

    ``sinks`` is [Hq]; ``window`` is 0 for none. In a full sequence S = T.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor
    scale: float
    window: int

    def visible(self) -> torch.Tensor:
        """Return which keys a row may see, bool [T, S]; the last row is at the last key."""
        keys = torch.arange(self.k.shape[2], device=self.q.device)
        rows = keys[-self.q.shape[2] :]
        distance = rows[:, None] - keys
        return (distance >= 0) & (distance < (self.window or len(keys)))


def attend(inputs: AttentionInputs, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``softmax(q kᵀ · scale + bias, sinks)`` v, [B, Hq, T, D].

    ``bias`` is added to the scores, [T, T] or [B, 1, T, T]. None means 0 at the visible keys and
    −∞ elsewhere.
    """
    rows, window = inputs.q.shape[2], inputs.window
    if bias is None and window and rows % window == 0 and rows > window:
        return _windowed(inputs)
    if bias is None:
        bias = _zero_bias(inputs.visible(), inputs.q.dtype)
    return _attend(inputs, bias)


def _windowed(inputs: AttentionInputs) -> torch.Tensor:
    """Attend in blocks of a window each, whose rows see only their block and the previous one."""
    w = inputs.window
    batch, _, rows, _ = inputs.q.shape

    def blocks(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (-1, w)).transpose(1, 2).flatten(0, 1)

    def with_block_before(x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x, (0, 0, w, 0))
        return torch.cat([blocks(padded[:, :, :rows]), blocks(x)], dim=2)

    block_inputs = replace(
        inputs, q=blocks(inputs.q), k=with_block_before(inputs.k), v=with_block_before(inputs.v)
    )
    visible = block_inputs.visible().repeat(rows // w, 1, 1)
    visible[0, :, :w].zero_()  # the first block has no previous one
    bias = _zero_bias(visible, inputs.q.dtype).repeat(batch, 1, 1).unsqueeze(1)
    out = _attend(block_inputs, bias)
    return out.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)


def _attend(inputs: AttentionInputs, bias: torch.Tensor) -> torch.Tensor:
    q, k, v = inputs.q, inputs.k, inputs.v
    width = q.shape[-1]
    padding = _ALIGNED - width % _ALIGNED
    sinks = (inputs.sinks.to(q.dtype) / inputs.scale).view(1, -1, 1, 1)
    q = torch.cat([q, sinks.expand(len(q), -1, q.shape[2], 1)], dim=-1)
    q = F.pad(q, (0, padding - 1))
    sink = F.pad(k.new_ones(len(k), k.shape[1], 1, 1), (width, padding - 1))
    k = torch.cat([F.pad(k, (0, padding)), sink], dim=2)
    v = F.pad(v, (0, 0, 0, 1))
    mask = F.pad(bias.to(q.dtype), (0, 1))
    groups = q.shape[1] // k.shape[1]
    if q.device.type == "cpu":
        return _attend_explicitly(q, k, v, mask, inputs.scale)
    k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
    v = F.pad(v, (0, padding))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=inputs.scale)
    return out[..., :width]


def _attend_explicitly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend with plain matrix products, which are faster on a CPU than the fused kernel."""
    grouped = (q * scale).unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    scores = (grouped @ k.mT).unflatten(2, (-1, q.shape[2]))
    mask = mask.unsqueeze(1) if mask.dim() == 4 else mask
    weights = (scores + mask).softmax(dim=-1).flatten(2, 3)
    return (weights @ v).view(*q.shape[:3], -1)


def _zero_bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
        ~visible, -torch.inf
    )


def _attention(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    inputs = AttentionInputs(q, k, v, module.sinks, scaling, sliding_window or 0)
    head = getattr(module, "head", None)
    out = attend(inputs) if head is None else head(inputs)
    return out.transpose(1, 2), None


def use_attention(model: Any) -> None:
    """Make ``model`` use this module's attention."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)
    model.config._attn_implementation = ATTENTION
