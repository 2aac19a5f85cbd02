"""How near a choice of the best came to another one."""

from __future__ import annotations

import math
from typing import Any

import torch


def choice_margin(scores: torch.Tensor, chosen: int) -> float:
    """The smallest distance from the last of the ``chosen`` best to the next, in any row."""
    if chosen == scores.shape[-1]:
        return math.inf
    ordered = scores.sort(dim=-1, descending=True).values
    return float((ordered[..., chosen - 1] - ordered[..., chosen]).min())


def biased_choice_margin(router: Any, logits: torch.Tensor) -> float:
    """The smaller of the distances between groups and between experts of the groups taken.

    ``router`` is one of transformers' that chooses by sigmoids and a bias, or DeepSeek-V2's.
    """
    if hasattr(router, "e_score_correction_bias"):
        scores, summed = logits.sigmoid() + router.e_score_correction_bias, 2
        grouped = True
    else:  # DeepSeek-V2: by a softmax, whose order is that of the logits
        scores, summed = logits, 1
        grouped = router.topk_method == "group_limited_greedy"
    if not grouped:
        return choice_margin(scores, router.top_k)
    by_group = scores.unflatten(-1, (router.num_group, -1))
    sums = by_group.topk(min(summed, by_group.shape[-1]), dim=-1).values.sum(dim=-1)
    taken = sums.topk(router.topk_group, dim=-1).indices
    kept = torch.zeros_like(sums).scatter(-1, taken, 1.0).bool().unsqueeze(-1)
    within = by_group.masked_fill(~kept, -torch.inf).flatten(-2)
    groups = choice_margin(sums, router.topk_group)
    return min(groups, choice_margin(within, router.top_k))
