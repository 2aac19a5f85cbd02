"""How an indexer's keys are cached: in the activations' type, or as fp8 (e4m3) bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# The largest e4m3 number: what is larger is cached as this.
E4M3_MOST = 448.0


def key_values(pool: torch.Tensor) -> torch.Tensor:
    """A pool's keys in fp32; one of bytes (uint8) holds e4m3."""
    import torch

    return (pool.view(torch.float8_e4m3fn) if pool.dtype == torch.uint8 else pool).float()


def as_cached(keys: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """Keys as ``pool`` holds them."""
    import torch

    if pool.dtype != torch.uint8:
        return keys.to(pool.dtype)
    return keys.clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).view(torch.uint8)
