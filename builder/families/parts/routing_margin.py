"""How near a choice of the best came to another one."""

from __future__ import annotations

import math

import torch


def choice_margin(scores: torch.Tensor, chosen: int) -> float:
    """The smallest distance from the last of the ``chosen`` best to the next, in any row."""
    if chosen == scores.shape[-1]:
        return math.inf
    ordered = scores.sort(dim=-1, descending=True).values
    return float((ordered[..., chosen - 1] - ordered[..., chosen]).min())
