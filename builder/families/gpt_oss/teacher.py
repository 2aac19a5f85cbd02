"""GPT-OSS in transformers as a teacher of drafts: its experts computed the quickest way."""

from __future__ import annotations

from typing import Any

import torch

# All experts as one dense product wastes arithmetic, but up to this many inner columns it beats
# the sort and the launches of a grouped product.
LARGEST_DENSE_WIDTH = 1024
DENSE_EXPERTS = "specbuild_dense"


def ready_to_teach(model: Any) -> None:
    """Chooses how the model in transformers computes its experts."""
    model.set_experts_implementation(_experts_implementation(model))


def _experts_implementation(model: Any) -> str:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    config = model.config
    if config.num_local_experts * config.intermediate_size > LARGEST_DENSE_WIDTH:
        return "grouped_mm"
    ALL_EXPERTS_FUNCTIONS.register(DENSE_EXPERTS, _dense_experts)
    return DENSE_EXPERTS


def _dense_experts(
    self: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Every expert for every row, unchosen ones weighted 0.

    ``hidden`` [T, H], ``chosen`` [T, k] and ``weights`` [T, k] → [T, H].
    """
    spread = hidden.new_zeros(len(hidden), self.num_experts)
    spread.scatter_(1, chosen, weights.to(spread.dtype))
    inner = torch.einsum("th,ehi->tei", hidden, self.gate_up_proj) + self.gate_up_proj_bias
    inner = self._apply_gate(inner) * spread.unsqueeze(-1)
    return torch.einsum("tei,eih->th", inner, self.down_proj) + spread @ self.down_proj_bias
