"""Attention of whole sequences with sinks, windows and selections, for transformers' GPT-OSS.

A sink is a key that every row sees and whose value is zero. Its score may differ by query head
though heads share keys: queries get one more column, their head's sink, that only this key reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

ATTENTION = "specbuild_whole_sequences"
# Heads' widths are kept a multiple of this many, which fused kernels ask for.
_ALIGNED = 8


@dataclass(frozen=True)
class Scene:
    """What attention reads: ``q`` [B, Hq, T, D], ``k`` and ``v`` [B, Hkv, S, D], rotated.

    ``sinks`` [Hq]; ``window`` 0 for none. In a whole sequence S = T.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor
    scale: float
    window: int

    def visible(self) -> torch.Tensor:
        """Which keys a row may see, bool [T, S]; the last row stands at the last key."""
        keys = torch.arange(self.k.shape[2], device=self.q.device)
        rows = keys[-self.q.shape[2] :]
        behind = rows[:, None] - keys
        return (behind >= 0) & (behind < (self.window or len(keys)))


def attend(scene: Scene, joins: torch.Tensor | None = None) -> torch.Tensor:
    """``softmax(q kᵀ · scale + joins, sinks)`` v → [B, Hq, T, D].

    ``joins`` are numbers that join the scores, [T, T] or [B, 1, T, T]; None stands for 0 at the
    visible keys and −∞ elsewhere.
    """
    rows, window = scene.q.shape[2], scene.window
    if joins is None and window and rows % window == 0 and rows > window:
        return _windowed(scene)
    if joins is None:
        joins = _blank(scene.visible(), scene.q.dtype)
    return _attend(scene, joins)


def _windowed(scene: Scene) -> torch.Tensor:
    """Blocks of one window each: a block's rows see nothing before the block ahead of it."""
    w = scene.window
    batch, _, rows, _ = scene.q.shape

    def blocks(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (-1, w)).transpose(1, 2).flatten(0, 1)

    def with_block_before(x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x, (0, 0, w, 0))
        return torch.cat([blocks(padded[:, :, :rows]), blocks(x)], dim=2)

    several = replace(
        scene, q=blocks(scene.q), k=with_block_before(scene.k), v=with_block_before(scene.v)
    )
    seen = several.visible().repeat(rows // w, 1, 1)
    seen[0, :, :w].zero_()  # nothing comes before the first block
    joins = _blank(seen, scene.q.dtype).repeat(batch, 1, 1).unsqueeze(1)
    out = _attend(several, joins)
    return out.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)


def _attend(scene: Scene, joins: torch.Tensor) -> torch.Tensor:
    q, k, v = scene.q, scene.k, scene.v
    width = q.shape[-1]
    more = _ALIGNED - width % _ALIGNED
    heads = (scene.sinks.to(q.dtype) / scene.scale).view(1, -1, 1, 1)
    q = torch.cat([q, heads.expand(len(q), -1, q.shape[2], 1)], dim=-1)
    q = F.pad(q, (0, more - 1))
    sink = F.pad(k.new_ones(len(k), k.shape[1], 1, 1), (width, more - 1))
    k = torch.cat([F.pad(k, (0, more)), sink], dim=2)
    v = F.pad(v, (0, 0, 0, 1))
    mask = F.pad(joins.to(q.dtype), (0, 1))
    groups = q.shape[1] // k.shape[1]
    if q.device.type == "cpu":
        return _explicit(q, k, v, mask, scene.scale)
    k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
    v = F.pad(v, (0, more))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scene.scale)
    return out[..., :width]


def _explicit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Plain products: on a CPU they are faster than the fused kernel."""
    grouped = (q * scale).unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    scores = (grouped @ k.mT).unflatten(2, (-1, q.shape[2]))
    mask = mask.unsqueeze(1) if mask.dim() == 4 else mask
    weights = (scores + mask).softmax(dim=-1).flatten(2, 3)
    return (weights @ v).view(*q.shape[:3], -1)


def _blank(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)


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
    scene = Scene(q, k, v, module.sinks, scaling, sliding_window or 0)
    head = getattr(module, "head", None)
    out = attend(scene) if head is None else head(scene)
    return out.transpose(1, 2), None


def use_attention(model: Any) -> None:
    """Makes ``model`` attend through this module."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)
    model.config._attn_implementation = ATTENTION
