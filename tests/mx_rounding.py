"""Round to MXFP8 (e4m3) and MXFP4 by lists of their values (OCP Microscaling v1.0).

The scale of a block of 32 columns is the power of two of section 6.3. It is doubled if the largest
magnitude would be rounded past the largest element. Ties go to even codes.
"""

from __future__ import annotations

import re

import torch
from checkpoint_files import Tensors

E4M3 = [m / 512 for m in range(8)] + [
    (1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)
]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = {"fp8": E4M3, "mxfp4": E2M1}
# The tensors that ``--weights-dtype`` quantizes, for GPT-OSS, Llama or Qwen3.
CODED = re.compile(r"(\.(q|k|v|o|gate|up|down)_proj|lm_head)\.weight$")


def mx_rounded(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Round ``weight`` [..., K], K a multiple of 32; return it in its own type."""
    grid = torch.tensor(VALUES[name], dtype=torch.float64)
    middles = (grid[1:] + grid[:-1]) / 2
    blocks = weight.double().unflatten(-1, (-1, 32))
    most = blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    scale = 2.0 ** (most.log2().floor() - grid[-1].log2().floor())
    beyond = 2 * grid[-1] - middles[-1]
    scale = torch.where(most > scale * beyond, 2 * scale, scale)
    magnitude = blocks.abs() / scale
    code = torch.bucketize(magnitude, middles)
    tie = magnitude == middles[code.clamp_max(len(middles) - 1)]
    code = code + (tie & (code % 2 == 1)).long()
    return (grid[code] * scale * blocks.sign()).flatten(-2).to(weight.dtype)


def round_checkpoint(tensors: Tensors, name: str, *, experts: bool = False) -> None:
    """Round projections and head to the format, and experts if requested."""
    for key in [key for key in tensors if CODED.search(key)]:
        if experts or ".experts." not in key:
            tensors[key] = mx_rounded(tensors[key], name)
