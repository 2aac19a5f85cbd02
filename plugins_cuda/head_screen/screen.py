"""The screened form of a vocabulary projection: int8 codes, and how far a logit may be off by them.

For a normed row x, a row w of the weight and its decoded codes ŵ, the kernels' sums L of w·x and L̂
of ŵ·x differ by at most ‖x‖ times

    ‖w − ŵ‖ + γ·(‖w‖ + ‖ŵ‖),    γ = K · 2^-22

The first part is Cauchy's and Schwarz's inequality. The second bounds the rounding of both sums: an
mma adds 16 exact products to an fp32 sum, 17 terms, each of which loses less than 2^-23 of the
largest, and no term or sum is larger than Σ|w_i·x_i| ≤ ‖w‖·‖x‖. K/16 of them follow one another, so
a sum is off by less than 17/16 · K · 2^-23 of that. What γ has left, 15/16 · K · 2^-23 with K ≥ 32,
covers that the bound itself is computed and added in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.block_scaled import decoded, quantised
from specbuild.plugins_cuda.linear.packing import BLOCK, TILE_VALUES, unpack_rows
from specbuild.plugins_cuda.linear.storage import INT8

if TYPE_CHECKING:
    import torch

# Values that are measured at once: bounds the memory, 40 bytes each.
_CHUNK_VALUES = 1 << 22


def screened(packed: torch.Tensor) -> torch.Tensor:
    """Codes u8 [V/16, ⌈K/64⌉, 1056] of a packed bf16 weight [V/16, K/32, 512], as ``INT8`` says."""
    return quantised(packed, INT8)


def screen_errors(packed: torch.Tensor) -> torch.Tensor:
    """By how much a logit of ``screened(packed)`` may be off for a row of length 1: fp32 [V]."""
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
        # The next float above the nearest is not below the number.
        above = torch.nextafter(off.float(), torch.tensor(float("inf")))
        errors[16 * first : 16 * first + len(off)] = above
    return errors
