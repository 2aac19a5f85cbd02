"""The dequantization of an expert's stored weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.moe.e2m1 import E2M1_CODES

if TYPE_CHECKING:
    import torch


def expert_weight(weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return an expert weight as fp32 [E, in, out].

    ``mxfp4``: blocks u8 [E, out, in/32, 16] (low nibble = even element, e2m1) and scales u8 [E,
    out, in/32]; a value is e2m1 · 2^(scale − 127). Otherwise the weight is [E, in, out] already.
    """
    import torch

    if scales is None:
        return weight.float()
    table = torch.tensor(E2M1_CODES, device=weight.device)
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=-1)  # by byte
    codes = pairs.index_select(0, weight.flatten().int()).view(*weight.shape[:-1], -1)
    values = codes * torch.exp2(scales.float() - 127.0).unsqueeze(-1)
    return values.flatten(-2).transpose(1, 2)
