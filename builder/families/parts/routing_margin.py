"""The margin of a top-k selection to the next candidate."""

from __future__ import annotations

import math
from typing import Any

import torch


def choice_margin(scores: torch.Tensor, selected: int) -> float:
    """Return the smallest distance between the last selected and the next score in any row."""
    if selected == scores.shape[-1]:
        return math.inf
    ordered = scores.sort(dim=-1, descending=True).values
    return float((ordered[..., selected - 1] - ordered[..., selected]).min())


def biased_choice_margin(router: Any, logits: torch.Tensor) -> float:
    """Return the smaller margin of selected groups and of experts within these groups.

    ``router`` is a transformers router with sigmoids and a bias, or DeepSeek-V2's.
    """
    if hasattr(router, "e_score_correction_bias"):
        scores, num_summed = logits.sigmoid() + router.e_score_correction_bias, 2
        is_grouped = True
    else:  # DeepSeek-V2 selects by a softmax, which keeps the order of the logits
        scores, num_summed = logits, 1
        is_grouped = router.topk_method == "group_limited_greedy"
    if not is_grouped:
        return choice_margin(scores, router.top_k)
    by_group = scores.unflatten(-1, (router.num_group, -1))
    sums = by_group.topk(min(num_summed, by_group.shape[-1]), dim=-1).values.sum(dim=-1)
    selected = sums.topk(router.topk_group, dim=-1).indices
    is_selected = torch.zeros_like(sums).scatter(-1, selected, 1.0).bool().unsqueeze(-1)
    within = by_group.masked_fill(~is_selected, -torch.inf).flatten(-2)
    groups = choice_margin(sums, router.topk_group)
    return min(groups, choice_margin(within, router.top_k))
