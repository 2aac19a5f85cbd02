"""The score of the DSA-lite indexer in plain torch, for the op and for training."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def indexer_scores(
    q: torch.Tensor, k: torch.Tensor, head_weights: torch.Tensor | None
) -> torch.Tensor:
    """Return ``score(t, s) = Σ_h w_h(t) · ReLU(q_h(t) · k(s))``, fp32 [..., T, S], differentiable.

    ``q`` [..., T, n_idx, d_idx] are the indexer's queries, ``k`` [..., S, d_idx] its keys, one head
    for all queries. ``head_weights`` [..., T, n_idx] weight the heads; None means weight 1 (the
    simple form has one head and no weights). Nothing is rotated, scaled or masked (the lightning
    indexer of DeepSeek-V3.2-Exp, equation 1).
    """
    import torch

    products = torch.einsum("...thd,...sd->...hts", q.float(), k.float()).relu()
    if head_weights is None:
        return products.sum(-3)
    return torch.einsum("...hts,...th->...ts", products, head_weights.float())
