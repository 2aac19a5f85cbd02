"""The types of cached indexer keys: the activations' type, or fp8 (e4m3) bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# The largest e4m3 number; larger values are clamped.
E4M3_MOST = 448.0


def key_values(pool: torch.Tensor) -> torch.Tensor:
    """Return a pool's keys in fp32; a pool of bytes (uint8) holds e4m3."""
    import torch

    return (pool.view(torch.float8_e4m3fn) if pool.dtype == torch.uint8 else pool).float()


def as_cached(keys: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """Convert keys to the type of ``pool``."""
    import torch

    if pool.dtype != torch.uint8:
        return keys.to(pool.dtype)
    return keys.clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).view(torch.uint8)
