"""The int8 prefilter of a head: quantized weights, and error bounds of their logits.

For a normalized row x, a row w of the weight and its dequantized values ŵ, the kernels' sums L of
w·x and L̂ of ŵ·x differ by at most ‖x‖ times

    ‖w − ŵ‖ + γ·(‖w‖ + ‖ŵ‖),    γ = K · 2^-22

The first term is the Cauchy-Schwarz inequality. The second bounds the rounding of both sums. An mma
adds 16 exact products to an fp32 sum. Each of these 17 terms loses less than 2^-23 of the largest
one, and no term or sum exceeds Σ|w_i·x_i| ≤ ‖w‖·‖x‖. K/16 mma follow each other, so the error of a
sum is below 17/16 · K · 2^-23 times that. The rest of γ, 15/16 · K · 2^-23 with K ≥ 32, covers the
fp32 arithmetic of the bound itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.block_scaled import decoded, quantised
from specbuild.plugins_cuda.linear.packing import BLOCK, TILE_VALUES, unpack_rows
from specbuild.plugins_cuda.linear.storage import INT8

if TYPE_CHECKING:
    import torch

# Values that are processed at once, to limit the memory: 40 bytes each.
_CHUNK_VALUES = 1 << 22


def screened(packed: torch.Tensor) -> torch.Tensor:
    """Return int8 values u8 [V/16, ⌈K/64⌉, 1056] of a packed bf16 weight [V/16, K/32, 512].

    The layout is that of ``INT8``.
    """
    return quantised(packed, INT8)


def screen_errors(packed: torch.Tensor) -> torch.Tensor:
    """Return the error bounds of logits of ``screened(packed)`` for rows of length 1, fp32 [V]."""
    import torch

    tiles, blocks, _ = packed.shape
    columns = blocks * BLOCK
    errors = torch.empty(tiles * 16, dtype=torch.float32, device=packed.device)
    if packed.is_meta:
        return errors
    gamma = columns * 2.0**-22
    step = max(1, _CHUNK_VALUES // (blocks * TILE_VALUES))
    for first in range(0, tiles, step):
        exact = packed[first : first + step]
        rows = unpack_rows(exact).double()
        codes = unpack_rows(decoded(screened(exact), columns, INT8)).double()
        off = (rows - codes).norm(dim=1) + gamma * (rows.norm(dim=1) + codes.norm(dim=1))
        # The float after the nearest one is not below the exact value.
        above = torch.nextafter(off.float(), torch.tensor(float("inf")))
        errors[16 * first : 16 * first + len(off)] = above
    return errors
